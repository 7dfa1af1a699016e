"""The files of deploy/: the dashboard names metrics that there are, units start a server with a
file of flags, and nginx sends on streams as they come."""

import configparser
import http.client
import json
import plistlib
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged.server import flags as server_flags
from tests.support import TIMEOUT
from tests.support.commands.server_harness import CODE, exchange, live, metric, post, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
NAME = "llm.example.org"
WORDS = {"sum", "by", "le", "rate", "increase", "histogram_quantile"}
"""Words of the dashboard's expressions that are not names of metrics."""


@pytest.fixture(scope="module")
def server():
    flags = ("--decode-concurrency", "1", "--allowed-hosts", f"{NAME},127.0.0.1")
    with live(*flags) as server:
        assert post(server, {"prompt": CODE, "max_tokens": 3})[0] == 200
        yield server


def targets():
    return [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def names_of(expression):
    """The metrics that an expression names."""
    bare = re.sub(r"\[\w+\]|\{.*?\}", "", expression)
    return set(re.findall(r"[a-zA-Z_][\w:]*", bare)) - WORDS


def known_metrics(text):
    """The labels of each name that a sample of /metrics may have."""
    known = {}
    for family in text_string_to_metric_families(text):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        labels = {label for sample in family.samples for label in sample.labels}
        for end in ends.get(family.type, [""]):
            known[f"{family.name}{end}"] = labels
    return known


def unknown_metrics(expressions, known):
    return [name for each in expressions for name in names_of(each) if name not in known]


def test_the_dashboard_names_metrics_that_there_are(server):
    known = known_metrics(exchange(server, "GET", "/metrics")[2].decode())
    assert unknown_metrics([target["expr"] for target in targets()], known) == []
    assert unknown_metrics(["sum(rate(mlx_paged_step_total[1m]))"], known)
    for target in targets():
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            (name,) = names_of(target["expr"])
            assert label in known[name] or not known[name], target


def test_the_panels_of_the_dashboard_are_apart():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)
    assert {target["datasource"]["uid"] for target in targets()} == {"${source}"}
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["source"]


def command_of_systemd():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "mlx_paged.service").read_text())
    return shlex.split(unit["Service"]["ExecStart"]), float(unit["Service"]["TimeoutStopSec"])


def command_of_launchd():
    unit = plistlib.loads((DEPLOY / "mlx_paged.plist").read_bytes())
    return unit["ProgramArguments"], float(unit["ExitTimeOut"])


@pytest.mark.parametrize("command", [command_of_systemd, command_of_launchd])
def test_a_unit_starts_a_server_and_lets_its_answers_end(command, tmp_path):
    (python, *words), patience_s = command()
    assert python.endswith("/.venv/bin/python") and words[:2] == ["-m", "mlx_paged.server"]
    (tmp_path / "keys").write_text("name s3cret\n")
    text = (DEPLOY / "server.toml").read_text().replace("/etc/mlx_paged/keys", f"{tmp_path}/keys")
    (tmp_path / "server.toml").write_text(text)
    flags = [word.replace(str(Path(word).parent), str(tmp_path)) if "/" in word else word
             for word in words[2:]]  # fmt: skip
    args = server_flags.parse(flags)
    assert args.config == str(tmp_path / "server.toml")
    assert args.api_keys == {"name": "s3cret"} and args.allowed_hosts[0] == NAME
    assert args.drain_seconds < patience_s


@pytest.fixture(scope="module")
def nginx(server, tmp_path_factory):
    """The port of an nginx that has the file of deploy/, before the server."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (DEPLOY / "nginx.conf").read_text()
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    for old, new in (
        ("server 127.0.0.1:8080;", f"server 127.0.0.1:{server.address[1]};"),
        ("listen 80;", f"listen 127.0.0.1:{port};"),
        ("http {\n", f"http {{\naccess_log off;\n{paths}"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    alone = f"daemon off; master_process off; pid {folder}/pid; error_log stderr;"
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", alone]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:

        def is_open():
            assert process.poll() is None, process.stderr.read()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(is_open)
        yield port
        process.terminate()


def through(port, method, path, body=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    given = {"Host": NAME, "Content-Type": "application/json"} | dict(headers)
    connection.request(method, path, body, given)
    return connection, connection.getresponse()


def test_nginx_sends_events_on_as_they_come(server, nginx):
    """A request that waits for another one gets a comment each second."""
    body = json.dumps({"prompt": CODE, "max_tokens": 1900, "ignore_eos": True, "stream": True})
    streams = []
    for _ in range(2):
        streams.append(through(nginx, "POST", "/v1/completions", body))
        wait_until(lambda: metric(server, "mlx_paged_requests_running") == 1)
    assert streams[1][1].readline().startswith(b": waiting")
    assert metric(server, "mlx_paged_requests_waiting") == 1
    for connection, _ in reversed(streams):
        connection.close()
    wait_until(lambda: not metric(server, "mlx_paged_requests_running"))


def test_nginx_refuses_what_the_server_would(server, nginx):
    limit = server_flags.parse([]).max_request_bytes
    for size, status in ((limit, 200), (limit + 1, 413)):
        body = json.dumps({"prompt": CODE, "max_tokens": 1})
        body += " " * (size - len(body))
        connection, answer = through(nginx, "POST", "/v1/completions", body)
        assert (answer.status, answer.read()[:1]) == (status, b"{" if status == 200 else b"<")
        connection.close()
    connection, answer = through(nginx, "GET", "/health", headers={"Host": "other.example.org"})
    assert answer.status == 421
    connection.close()


def test_nginx_gives_each_request_an_id(server, nginx):
    ids = set()
    for _ in range(2):
        connection, answer = through(nginx, "GET", "/health")
        ids.add(answer.headers["x-request-id"])
        connection.close()
    assert len(ids) == 2 and all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
