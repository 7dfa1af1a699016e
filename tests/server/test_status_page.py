"""The status page: latencies of the last minutes, ended requests, errors, names of models."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged.server.metrics import SECONDS
from mlx_paged.server.recent import WINDOW_S, Recent
from tests.support import TIMEOUT
from tests.support.commands import server_harness
from tests.support.commands.server_harness import exchange, live, post


class Latencies:
    """A histogram with its recent percentiles, and a clock that stands still by itself."""

    def __init__(self):
        self.now = 1000.0
        self.histogram = Histogram(
            "latency", "x", ["model"], buckets=SECONDS, registry=CollectorRegistry()
        )
        self.recent = Recent(self.histogram, SECONDS, lambda: self.now)

    def observe(self, *values, model="m"):
        for value in values:
            self.recent.note()
            self.histogram.labels(model).observe(value)


def bucket(value):
    """The bounds between which a histogram knows a value."""
    place = int(np.searchsorted(SECONDS, value))
    return (0.0, *SECONDS)[place], SECONDS[place]


def test_percentiles_are_in_the_bucket_of_the_exact_ones():
    found, values = Latencies(), np.random.default_rng(0).lognormal(-3, 1, 1000)
    found.observe(*values)
    for name, value in found.recent.percentiles("m").items():
        low, high = bucket(np.percentile(values, int(name[1:]), method="inverted_cdf"))
        assert low <= value <= high


def test_a_value_within_a_bucket_is_interpolated():
    found = Latencies()
    found.observe(*[0.03] * 50, *[0.07] * 50)
    assert found.recent.percentiles("m") == {"p50": 0.05, "p99": pytest.approx(0.05 + 0.049)}
    found.observe(*[1e6] * 100)
    assert found.recent.percentiles("m")["p99"] == SECONDS[-1]


def test_what_is_older_than_the_window_does_not_count():
    found = Latencies()
    found.observe(20.0, 20.0)
    found.now += WINDOW_S / 2
    found.observe(0.002)
    assert found.recent.percentiles("m")["p99"] > 10
    found.now += WINDOW_S / 2 + 1
    assert found.recent.percentiles("m")["p99"] < 0.0025
    found.now += WINDOW_S
    assert found.recent.percentiles("m") == {"p50": None, "p99": None}
    found.observe(0.002)
    assert found.recent.percentiles("m")["p50"] < 0.0025


def test_models_are_apart():
    found = Latencies()
    found.observe(20.0, model="slow")
    found.observe(0.002, model="fast")
    assert found.recent.percentiles("fast")["p99"] < 0.01 < found.recent.percentiles("slow")["p50"]
    assert found.recent.percentiles("other") == {"p50": None, "p99": None}


def test_the_status_says_what_the_metrics_say():
    with live("--served-model-name", "mine") as server:
        ask = {"model": "mine", "prompt": "def f(", "max_tokens": 5}
        for _ in range(3):
            assert post(server, ask)[0] == 200
        assert post(server, ask | {"top_p": 7})[0] == 400
        assert exchange(server, "GET", "/nowhere")[0] == 404
        status = json.loads(exchange(server, "GET", "/status")[2])
        metrics = exchange(server, "GET", "/metrics")[2].decode()
    [model] = status["models"]
    assert model["model"] == "mine"
    assert sum(model["ended"].values()) == 3
    for reason, count in model["ended"].items():
        line = f'vllm:request_success_total{{finished_reason="{reason}",model_name="mine"}} {count}'
        assert line in metrics
    assert status["failed_answers"] == {"400": 1, "404": 1}
    held = status["memory"]["held"]
    assert held["bodies_and_answers"]["bytes"] == 0 < held["bodies_and_answers"]["limit"]
    assert held["weights"]["bytes"] > 0 < held["pool_idle"]["bytes"]
    families = {each.name: each.samples for each in text_string_to_metric_families(metrics)}
    told = {s.labels["what"]: s.value for s in families["mlx_paged_memory_limit_bytes"]}
    assert told == {name: each["limit"] for name, each in held.items() if each["limit"] is not None}
    told = {s.labels["what"]: s.value for s in families["mlx_paged_memory_held_bytes"]}
    assert told.keys() == held.keys() and told["weights"] == held["weights"]["bytes"]
    [of_process] = families["mlx_paged_process_bytes"]
    assert 0.8 < of_process.value / status["memory"]["process_bytes"] < 1.25
    is_watched = model["pressure"] is not None
    assert ("# TYPE mlx_paged_given_back_bytes_total counter" in metrics) == is_watched
    for name in ("time_to_first_token", "inter_token_latency"):
        assert f'vllm:{name}_seconds_count{{model_name="mine"}}' in metrics
        assert 0 < model[name]["p50"] <= model[name]["p99"]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script")
def test_the_page_shows_chains_and_their_pins():
    text = "def one_secret_name(argument):\n    return argument + 12345\n" * 2
    script = Path(server_harness.__file__).with_name("status_page.js")
    page = str(files("mlx_paged") / "server" / "status.html")
    with live("--kv-block-size", "4", "--api-key", "ann=k", "--admin-key", "boss") as server:
        for salt, retain in (("", 3600), ("a", "pin"), ("b", None)):
            ask = {"prompt": text, "max_tokens": 1, "cache_salt": salt}
            ask |= {"cache": {"retain": retain}} if retain else {}
            assert post(server, ask, headers={"x-api-key": "k"})[0] == 200
        found = {}
        for key in ("k", "boss"):
            url = f"http://127.0.0.1:{server.address[1]}/"
            run = subprocess.run(
                ["node", str(script), page, url, key],
                check=True,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            found[key] = json.loads(run.stdout)
    assert not any(texts["note"] for texts in found.values()), "the script failed"
    assert "secret" not in str(found) and "all of these" in found["k"]["memory"]
    assert (
        "without a salt: 1, " in found["k"]["known"] and "pinned for 60 min" in found["k"]["known"]
    )
    of_all = found["boss"]["known"]
    assert "of all salts: 3, " in of_all and of_all.count("|none") == 1
    assert of_all.count("|-|pinned for 60 min, ") == of_all.count("|-|pinned, ") == 1
