"""--log-format json: each line of the log is a JSON object, with the id of its request, and without
what clients have written."""

import json
import logging
import sys
import threading
from datetime import UTC, datetime

import pytest

from mlx_paged.server import __main__ as command
from mlx_paged.server import flags as server_flags
from mlx_paged.server.log_format import FORMATS, REQUEST_ID
from tests.support.commands.server_harness import CODE, live, post, wait_until

CONTROLS = "\x1b[31m\r\n\u2028\ud800\xe9"
SECRET = "XyZZy"


class Lines(logging.Handler):
    """What the log would write, line by line."""

    def __init__(self):
        super().__init__()
        self.setFormatter(FORMATS["json"])
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))

    def of(self, request_id):
        parsed = [json.loads(line) for line in list(self.lines)]
        return [each for each in parsed if each.get("request_id") == request_id]


@pytest.fixture
def log():
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def record(message, *args, exc_info=None):
    return logging.LogRecord("mlx_paged.x", logging.WARNING, "f.py", 1, message, args, exc_info)


def test_a_record_is_one_line_of_ascii():
    made = record("a %s", CONTROLS)
    line = FORMATS["json"].format(made)
    assert line.isascii() and line.isprintable()
    found = json.loads(line)
    assert found == {
        "time": found["time"],
        "level": "WARNING",
        "logger": "mlx_paged.x",
        "message": f"a {CONTROLS}",
    }
    written = datetime.fromisoformat(found["time"])
    assert written.tzinfo == UTC and abs(written.timestamp() - made.created) <= 1e-3


def test_a_traceback_is_part_of_its_line():
    try:
        raise KeyError(CONTROLS)
    except KeyError:
        line = FORMATS["json"].format(record("failed", exc_info=sys.exc_info()))
    assert line.isprintable()
    found = json.loads(line)
    assert found["message"] == "failed"
    assert found["exception"].startswith("Traceback") and "KeyError" in found["exception"]


def test_the_flag_chooses_what_stderr_gets(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    args = server_flags.parse(["--log-format", "json", "--log-level", "WARNING"])
    command._log_to_stderr(args.log_level, args.log_format)
    logging.getLogger("mlx_paged.x").warning("seen")
    logging.getLogger("mlx_paged.x").info("not seen")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "seen"


def test_lines_have_the_id_of_their_request(log):
    with live() as server:

        def ask(number):
            headers = {"X-Request-Id": f"id-{number}"}
            body = {"prompt": CODE, "max_tokens": 3, f"unknown_{number}": 1}
            assert post(server, body, headers=headers)[0] == 200

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: sum("POST" in line for line in log.lines) >= 4)
    for number in range(4):
        unknown, ended = log.of(f"id-{number}")
        assert f"unknown_{number}" in unknown["message"]
        assert ended["logger"] == "mlx_paged.server.request_log"
        assert ended["message"].endswith(f"id id-{number}")
    assert REQUEST_ID.get() is None
    assert any("serving" in line or "memory" in line for line in log.lines)
    assert all("request_id" not in each for each in log.of(None))


def test_no_text_of_a_prompt_reaches_the_log(log):
    words = f"{SECRET} and more {SECRET}"
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 2}
    bodies = [
        ({"prompt": words, "max_tokens": 2}, "/v1/completions", 200),
        ({"prompt": [words] * 2, "max_tokens": 2}, "/v1/completions", 200),
        ({"prompt": words * 2000, "max_tokens": 2}, "/v1/completions", 400),
        ({"prompt": {"text": words}}, "/v1/completions", 400),
        ({"prompt": words, "stop": {"a": words}}, "/v1/completions", 400),
        ({"prompt": words, "response_format": {"type": "json_schema"}}, "/v1/completions", 400),
        (chat, "/v1/chat/completions", 200),
        ({"messages": [{"role": words, "content": words}]}, "/v1/chat/completions", 400),
        ({"messages": [{"role": "user", "content": {"a": words}}]}, "/v1/chat/completions", 400),
        ({"messages": [{"role": "user", "content": [words]}]}, "/v1/chat/completions", 400),
        ({"messages": [{"role": "user", "contents": words}]}, "/v1/chat/completions", 400),
        ({"messages": words}, "/v1/chat/completions", 400),
        (chat | {"tools": [{"description": words}]}, "/v1/chat/completions", 400),
        (chat, "/v1/messages", 200),
        ({"input": words, "max_output_tokens": 2}, "/v1/responses", 200),
        ({"content": words}, "/tokenize", 200),
    ]
    with live() as server:
        for number, (body, path, status) in enumerate(bodies):
            headers = {"X-Request-Id": f"n{number}"}
            assert post(server, body, path, headers=headers)[0] == status, body
        wait_until(lambda: sum("POST" in line for line in log.lines) >= len(bodies))
    assert all(log.of(f"n{number}") for number in range(len(bodies)))
    assert [line for line in log.lines if SECRET in line] == []
