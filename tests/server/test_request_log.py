"""Each request has an id and one line in the log."""

import http.client
import io
import json
import logging
import re
from urllib.parse import quote

import pytest

from mlx_paged.server.log_format import Formatter
from tests.support import TIMEOUT
from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    client,
    exchange,
    live,
    metric,
    post,
    wait_until,
)

BODY = {"prompt": CODE, "max_tokens": 3}
pytest_plugins = ["tests.support.commands.server_fixtures"]


@pytest.fixture
def lines(caplog):
    """The log's lines about requests of completions, once `count` are there."""
    caplog.set_level(logging.INFO)

    def found(count=1):
        def now():
            return [text for text in caplog.messages if text.startswith("POST ")]

        wait_until(lambda: len(now()) >= count)
        assert len(now()) == count
        return now()

    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_tells_what_an_answer_took(server, lines, stream):
    with client(server) as made:
        options = {"model": MODEL, "stream": stream, "extra_headers": {"X-Request-Id": "mine-1"}}
        answer = made.completions.create(**BODY, **options)
        if stream:
            list(answer)
        else:
            assert answer._request_id == "mine-1"
    (line,) = lines()
    assert re.fullmatch(
        r"POST '/v1/completions': 200, model 'default_model', \d+ tokens in, \d+ cached, 3 out, "
        r"first after \d+\.\d{3} s, \d+\.\d{3} s, id mine-1",
        line,
    )


@pytest.mark.parametrize("given", ["", "a" * 129, "caf\xe9", "a\tb"])
def test_an_id_that_cannot_be_one_is_replaced(server, lines, given):
    _, headers, _ = post(server, BODY, headers={"X-Request-Id": given})
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert headers["request-id"] == headers["x-request-id"]
    assert lines()[0].endswith(f"id {headers['x-request-id']}")


def test_refusals_have_ids_and_reasons(server, lines):
    status, headers, _ = post(server, BODY | {"n": 0}, headers={"X-Request-Id": "r"})
    assert (status, headers["x-request-id"]) == (400, "r")
    (line,) = lines()
    assert re.fullmatch(r"POST '/v1/completions': 400, n: expected .*, \d+\.\d+ s, id r", line)


def test_a_client_that_goes_away_has_a_line(server, lines):
    with client(server) as made:
        options = {"prompt": CODE, "max_tokens": 1500, "logit_bias": {"1791": -100}}
        stream = made.completions.create(model=MODEL, stream=True, **options)
        next(iter(stream))
        stream.close()
    (line,) = lines()
    assert "200, the client disconnected before the end of its answer, model" in line


def test_an_answer_that_the_server_gives_up_is_not_the_clients_end(lines):
    with live() as server:
        body = {"prompt": CODE, "max_tokens": 1500, "logit_bias": {"1791": -100}}
        connection = http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=TIMEOUT)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") > 0)
        server.app.state.forced = True
        connection.close()
        (line,) = lines()
    assert "503, the server was stopped before the end of its answer, model" in line


def test_paths_may_have_the_root_of_a_proxy():
    with live("--root-path", "/llm/") as server:
        for path in ("/llm/v1/completions", "/v1/completions"):
            assert post(server, BODY, path)[0] == 200
        assert post(server, BODY, "/other/v1/completions")[0] == 404
        assert post(server, BODY, "/llmv1/completions")[0] == 404
        assert exchange(server, "GET", "/llm/health")[0] == 200


CONTROLS = "\x1b[31m\x07\x9b2J\r\n\x7f\u202e\u2028"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_control_characters_of_a_path_are_escaped(server, caplog, method):
    caplog.set_level(logging.INFO)
    path = "/v1/models/" + quote(CONTROLS)
    status, _, _ = exchange(server, method, path, b"{}" if method == "POST" else None)
    assert status in (404, 405)
    wait_until(lambda: any(text.startswith(method) for text in caplog.messages))
    (line,) = [text for text in caplog.messages if text.startswith(method)]
    assert line.isprintable() and line.count("\\x1b[31m") == 2


def test_no_line_of_the_log_has_control_characters():
    """Whatever a message or an error repeats; a traceback keeps its lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter("%(levelname)s - %(message)s"))
    logger = logging.Logger("planted")
    logger.addHandler(handler)
    logger.info("a field %s, caf\xe9", CONTROLS)
    try:
        raise ValueError(CONTROLS)
    except ValueError:
        logger.exception("an answer failed")
    first, failed, *traceback = stream.getvalue().removesuffix("\n").split("\n")
    assert first.startswith("INFO - a field \\x1b[31m\\x07\\x9b2J\\r\\n") and "caf\xe9" in first
    assert failed == "ERROR - an answer failed" and traceback[0].startswith("Traceback")
    assert len(traceback) > 3 and all(line.isprintable() for line in (first, *traceback))


@pytest.mark.parametrize("path", ["/status", "/metrics", "/ready", "/health"])
def test_what_is_polled_has_its_line_only_at_debug(server, caplog, path):
    caplog.set_level(logging.DEBUG)
    assert exchange(server, "GET", path)[0] == 200

    def found():
        return [r.levelno for r in caplog.records if r.getMessage().startswith(f"GET '{path}'")]

    wait_until(found)
    assert found() == [logging.DEBUG]
