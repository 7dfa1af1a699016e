"""The server's /metrics shows the metrics of its engine."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged.metrics.recorder import BUCKETS_MS
from mlx_paged.metrics.tick import PARTS, PHASES
from mlx_paged.server import flags as server_flags
from mlx_paged.server.__main__ import main
from tests.support.commands.server_harness import CODE, exchange, live, only_model, post

BUCKET = "mlx_paged_decode_tick_seconds_bucket"


def samples(server) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    text = exchange(server, "GET", "/metrics")[2].decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_what_the_engine_counted():
    with live("--kv-block-size", "4", "--spike-ms", "0.001") as server:
        for _ in range(2):
            assert post(server, {"prompt": CODE * 3, "max_tokens": 6, "n": 3})[0] == 200
        engine = only_model(server).service._engine
        found, stats, ticks = samples(server), engine.stats, list(engine.ticks)
    for name in ("cow_clones", "evictions", "decode_tokens", "prefix_hit_tokens", "kv_bytes_read"):
        assert found[f"mlx_paged_{name}_total",] == getattr(stats, name)
    assert found["mlx_paged_kv_blocks_touched_total",] == stats.blocks_touched
    budget = engine.memory_budget.parts
    assert {use: found["mlx_paged_memory_budget_bytes", use] for use in budget} == budget
    held = {kind: found["mlx_paged_mlx_memory_bytes", kind] for kind in ("active", "cached")}
    assert 0 < sum(held.values()) <= found["mlx_paged_mlx_memory_bytes", "peak"] + held["cached"]
    assert stats.cow_clones and stats.prefix_hit_tokens and stats.kv_bytes_read
    num_prefills = sum(tick.has_prompt_tokens for tick in ticks)
    assert found["mlx_paged_prefill_chunk_seconds_count",] == num_prefills > 0
    assert found["mlx_paged_decode_tick_seconds_count",] == len(ticks) - num_prefills > 0
    assert found["mlx_paged_decode_tick_seconds_sum",] == pytest.approx(
        sum(tick.tick_ms for tick in ticks if not tick.has_prompt_tokens) / 1000
    )
    buckets = {float(key[1]): value for key, value in found.items() if key[0] == BUCKET}
    assert buckets == {
        ms / 1000: sum(t.tick_ms <= ms for t in ticks if not t.has_prompt_tokens)
        for ms in (*BUCKETS_MS, math.inf)
    }
    for part in PARTS:
        assert found["mlx_paged_tick_seconds_total", part.removesuffix("_ms")] == pytest.approx(
            sum(getattr(tick, part) for tick in ticks) / 1000
        )
    spikes = {key[1]: value for key, value in found.items() if key[0] == "mlx_paged_spikes_total"}
    assert sum(spikes.values()) == len(ticks)
    assert found["mlx_paged_kv_blocks_referenced", "0"] == engine.manager.allocator.num_blocks
    assert found["mlx_paged_profiling",] == 0
    assert ("mlx_paged_tick_seconds_total", "forward") not in found


@pytest.mark.slow
def test_metrics_tell_what_a_disk_gave(tmp_path):
    flags, answers = ("--kv-block-size", "4", "--kv-disk", str(tmp_path)), []
    for life in range(2):
        with live(*flags) as server:
            status, _, body = post(server, {"prompt": CODE * 3, "max_tokens": 6, "temperature": 0})
            found, disk = samples(server), only_model(server).service._engine.metrics()["kv_disk"]
        assert status == 200
        answers.append(body["choices"][0]["text"])
        for name in ("hits", "bytes_read", "slower"):
            assert found[f"mlx_paged_kv_disk_{name}_total",] == disk[name], name
        assert bool(disk["hits"]) == bool(life), "not what the last server wrote"
        damaged = next(tmp_path.glob("*.kv")).with_name("00000099.kv")
        damaged.write_bytes(b"not a pack")
        if life:
            assert found["mlx_paged_kv_disk_dropped_total", "format"] == 1
    assert answers[0] == answers[1]


def test_a_profiling_server_says_so_and_tells_the_phases(tmp_path):
    path = tmp_path / "ticks.jsonl"
    with live("--profile", "--metrics-jsonl", str(path)) as server:
        post(server, {"prompt": CODE, "max_tokens": 3})
        found = samples(server)
    assert found["mlx_paged_profiling",] == 1
    assert {phase.removesuffix("_ms") for phase in PHASES} < {
        key[1] for key in found if key[0] == "mlx_paged_tick_seconds_total"
    }
    assert len(path.read_text().splitlines()) == 3


def test_a_file_that_cannot_be_written_is_one_line(capsys, tmp_path):
    path = tmp_path / "no" / "directory"
    assert main(["--port", "0", "--metrics-jsonl", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlx_paged.server: error: ") and str(path) in line


def test_metrics_flags_become_options_of_the_engine():
    args = server_flags.parse(["--profile", "--spike-ms", "7", "--metrics-jsonl", "x"])
    options = server_flags.engine_options(args)
    assert (options["profile"], options["spike_ms"], options["metrics_jsonl"]) == (True, 7, "x")


def test_dashboards_of_vllm_find_what_they_read():
    """With the name that the model is served under."""
    with live("--served-model-name", "tiny,other") as server:
        for n in (1, 2):
            assert post(server, {"prompt": CODE, "max_tokens": 5, "n": n})[0] == 200
        found, stats = samples(server), only_model(server).service._engine.stats
    assert found["vllm:time_to_first_token_seconds_count", "tiny"] == 3
    assert found["vllm:inter_token_latency_seconds_count", "tiny"] == 3 * 4
    assert found["vllm:e2e_request_latency_seconds_count", "tiny"] == 3
    assert found["vllm:request_success_total", "length", "tiny"] == 3
    assert found["vllm:request_queue_time_seconds_count", "tiny"] == 2  # the third one is a sample
    queued, first, between, whole = (
        found[f"vllm:{name}_seconds_sum", "tiny"]
        for name in (
            "request_queue_time",
            "time_to_first_token",
            "inter_token_latency",
            "e2e_request_latency",
        )
    )
    assert 0 < queued < first < first + between <= whole
    assert found["vllm:generation_tokens_total", "tiny"] == stats.generation_tokens == 15
    prompts = stats.prompt_tokens + stats.prefix_hit_tokens
    assert found["vllm:prompt_tokens_total", "tiny"] == prompts
    assert found["vllm:num_requests_running", "tiny"] == 0
    assert found["vllm:num_preemptions_total", "tiny"] == 0
