"""The server starts and stops cleanly, and refuses wrong flags."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import mlx_lm.server
import pytest

import mlx_paged
from mlx_paged.server import flags as server_flags
from mlx_paged.server import loaded_model
from mlx_paged.server.__main__ import main
from tests.support.commands.server_harness import (
    CODE,
    TIMEOUT,
    live,
)

LONG = {"max_tokens": 1500, "prompt": CODE, "logit_bias": {"1791": -100}}  # 1791 ends a text
pytest_plugins = ["tests.support.commands.server_fixtures"]
SLOW = """
import runpy
import time
from mlx_paged.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: time.sleep(0.02) or step(engine)
runpy.run_module("mlx_paged.server", run_name="__main__", alter_sys=True)
"""
"""A server on which LONG takes 30 s, so that no text ends before a signal."""
ENDED = b"the answer ended early: the server is stopping"
JSON = "Content-Type: application/json\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "how", "flags", "end"),
    [
        (["-c", SLOW], [signal.SIGINT], ["--drain-seconds", "0.2"], ENDED),
        (["-c", SLOW], [signal.SIGTERM], ["--drain-seconds", "0.2"], ENDED),
        (["-m", "mlx_paged.server"], [signal.SIGTERM], [], b"[DONE]"),
        (["-c", SLOW], [signal.SIGINT, signal.SIGINT], [], None),
    ],
    ids=["interrupted", "short", "finished", "forced"],
)
def test_a_signal_ends_the_server_cleanly_in_the_middle_of_a_stream(program, how, flags, end):
    process = subprocess.Popen(
        [sys.executable, *program, "--port", "0", "--kv-memory", "0.05", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    line = next(line for line in process.stderr if "serving" in line)
    host, port = line.rsplit("//", 1)[1].split(":")
    assert host == "127.0.0.1"
    body = json.dumps(LONG | {"stream": True}).encode()
    with socket.create_connection((host, int(port)), TIMEOUT) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        begun = b""
        while b"data:" not in begun:  # headers and comments come before
            begun += connection.recv(4096) or pytest.fail("the stream ended")
        errors, answer = "", b""
        for number in how:
            os.kill(process.pid, number)
            line = ""
            while "connections to close" not in line and "stopped" not in line:  # it drains
                errors += (line := next(process.stderr))
        errors += process.communicate(timeout=TIMEOUT)[1]
        with suppress(ConnectionResetError):
            answer += b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "open answers: 1; in " in errors and "a second Ctrl-C ends them now" in errors
    if end is None:
        assert "the server was stopped before the end of its answer" in errors
        assert "ERROR" not in errors and "disconnected" not in errors and b"[DONE]" not in answer
    else:
        assert end in answer and answer.endswith(b"0\r\n\r\n")


def test_a_signal_before_the_first_request_leaves_no_warning():
    """Python warns of a coroutine that was never awaited."""
    code = (
        "import signal, sys\n"
        "from mlx_paged.server import __main__ as command\n"
        "from mlx_paged.server.listener import asyncio\n"
        "class Interrupted(asyncio.Runner):\n"
        "    def run(self, *args, **options):\n"
        "        raise KeyboardInterrupt\n"
        "asyncio.Runner = Interrupted\n"
        "command.start(command.main, interrupted=0)\n"
    )
    command = [sys.executable, "-c", code, "--port", "0", "--kv-memory", "0.05"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert found.returncode == 0 and "serving" in found.stderr
    assert "Warning: " not in found.stderr and "PyTorch" not in found.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-draft-tokens", "0"], "expected a whole number from 1 to 15"),
        (["--kv-bits", "5"], "argument --kv-bits: kv_bits is '5': expected 8"),
        (["--kv-group-size", "32"], "argument --kv-group-size: expected 64, got '32'"),
        (["--quantized-kv-start", "9"], "argument --quantized-kv-start: expected 5000, got '9'"),
        (["--prompt-concurrency", "2"], "--prompt-concurrency is given"),
        (["--prompt-cache-size", "3"], "--prompt-cache-size: expected 0 or 10"),
        (["--ssl-certfile", "x"], "expected both or none"),
        (["--pipeline"], "--pipeline is given: more than one device is not supported"),
        (["--max-queue", "-1"], "expected a whole number >= 0"),
        (["--max-stall-ms", "-1"], "expected a number of milliseconds >= 0"),
        (["--prompt-cache-bytes", "much"], "expected a size such as 2GB"),
        (["--chat-template-args", "[]"], "expected a JSON object"),
        (["--chat-template", "none.jinja"], "expected a template or a file that has one, got"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_that_cannot_be_served_are_named(capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        server_flags.parse(flags)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--policy", "--preempt"])
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(capsys, flag):
    with pytest.raises(SystemExit):
        server_flags.parse([flag, "x"])
    assert "<" not in capsys.readouterr().err  # as in <Policy.FCFS: 'fcfs'>


@pytest.mark.parametrize(
    ("flags", "option", "value"),
    [
        (["--prompt-cache-bytes", "2MB"], "kv_memory", 2_000_000),
        (["--prompt-cache-bytes", "2MB", "--kv-memory", "0.5"], "kv_memory", 500_000_000),
        ([], "kv_memory", None),
        (["--cache-limit", "0.5"], "cache_limit", 500_000_000),
        (["--prompt-cache-size", "0"], "prefix_cache", False),
        (["--no-prefix-cache"], "prefix_cache", False),
        ([], "prefix_cache", True),
        (["--decode-concurrency", "3"], "max_running", 3),
        (["--prefill-step-size", "7"], "prefill_chunk", 7),
        ([], "max_stall_ms", 150.0),
        (["--max-stall-ms", "40"], "max_stall_ms", 40.0),
        (["--max-stall-ms", "0"], "max_stall_ms", None),
    ],
    ids=str,
)
def test_flags_become_options_of_the_engine(flags, option, value):
    assert server_flags.engine_options(server_flags.parse(flags))[option] == value


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(server_flags.API_KEY_VARIABLE, "secret")
    assert server_flags.parse([]).api_keys == {"": "secret"}
    assert server_flags.parse(["--api-key", "other"]).api_keys == {"": "other"}


def parser_of_mlx_lms_server(monkeypatch) -> argparse.ArgumentParser:
    class Caught(Exception):
        pass

    def catch(parser):
        raise Caught(parser)

    with monkeypatch.context() as patch, pytest.raises(Caught) as caught:
        patch.setattr(argparse.ArgumentParser, "parse_args", catch)
        mlx_lm.server.main()
    return caught.value.args[0]


OTHER_DEFAULTS = {"--prefill-step-size": (2048, 512), "--allowed-origins": ("*", None)}
"""Their default and ours; docs/server.md names each of these flags."""


def test_every_flag_of_mlx_lms_server_is_known_with_its_default(monkeypatch):
    theirs = parser_of_mlx_lms_server(monkeypatch)
    ours = server_flags.make_parser()
    flags = set(theirs._option_string_actions)
    assert len(flags) > 20 and flags <= set(ours._option_string_actions)
    for flag in flags:
        a, b = (parser._option_string_actions[flag] for parser in (theirs, ours))
        assert (a.nargs, a.const, a.choices) == (b.nargs, b.const, b.choices), flag
        assert b.dest == a.dest and not b.required, flag
        expected = OTHER_DEFAULTS.get(flag, (a.default, a.default))
        assert (a.default, b.default) == expected, flag
    documented = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    for flag, (_, default) in OTHER_DEFAULTS.items():
        assert f"| `{flag}` | {str(default).lower()} by default" in documented


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model", "some/model"),
        ("--adapter-path", "adapters"),
        ("--host", "0.0.0.0"),
        ("--port", "80"),
        ("--allowed-origins", "http://a,http://b"),
        ("--trust-remote-code", None),
        ("--log-level", "DEBUG"),
        ("--chat-template", "{{ x }}"),
        ("--use-default-chat-template", None),
        ("--temp", "0.5"),
        ("--top-p", "0.9"),
        ("--top-k", "40"),
        ("--min-p", "0.1"),
        ("--max-tokens", "64"),
        ("--chat-template-args", '{"enable_thinking": false}'),
        ("--decode-concurrency", "4"),
        ("--prefill-step-size", "128"),
        ("--prompt-cache-size", "0"),
        ("--prompt-cache-bytes", "2GB"),
    ],
)
def test_values_of_mlx_lms_flags_are_read_as_there(monkeypatch, flag, value):
    given = [flag] if value is None else [flag, value]
    theirs, _ = parser_of_mlx_lms_server(monkeypatch).parse_known_args(given)
    ours = server_flags.parse(given)
    name = flag.removeprefix("--").replace("-", "_")
    assert getattr(ours, name) == getattr(theirs, name) != server_flags.parse([]).__dict__[name]


def test_a_template_may_be_in_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}\n")
    assert server_flags.parse(["--chat-template", str(path)]).chat_template == "{{ messages }}\n"


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(server, monkeypatch, capsys):
    monkeypatch.setattr(loaded_model, "load_with_config", None)
    assert main(["--port", str(server.address[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_nothing_from_the_network_is_unpickled():
    package = Path(mlx_paged.__file__).parent
    for path in (*package.glob("server/*.py"), *package.glob("protocol/*.py")):
        source = path.read_text()
        assert "pickle" not in source and "_share_" not in source and "eval(" not in source


def test_what_cannot_be_served_is_reported_in_one_line(server, tmp_path, capsys):
    taken = str(server.address[1])
    near, far = f"--host 127.0.0.1 --port {taken}: ", "--host 203.0.113.9 --port 0: "
    for flags, message in (
        (["--model", "/nowhere"], "model /nowhere: no such directory"),
        (["--model", str(tmp_path)], f"model {tmp_path}: it has no config.json: expected a"),
        (["--adapter-path", "/nowhere"], "adapter /nowhere: no such directory"),
        (["--use-default-chat-template"], "has no attribute default_chat_template"),
        (["--port", taken, "--kv-memory", "0.05"], f"{near}Address already in use: expected an"),
        (["--host", "203.0.113.9", "--kv-memory", "0.05"], f"{far}Cannot assign requested address"),
        (["--kv-memory", "1e-9"], "expected at least"),
        (["--chat-template", "{% if"], "chat template: line 1: "),
    ):
        threads = threads_of_models()
        assert main(["--port", "0", *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("mlx_paged.server: error: ") and message in line
        assert threads_of_models() == threads


def threads_of_models() -> list[str]:
    """Names of the threads that load models and compute. Others of a server begin at any time."""
    names = ("mlx_paged.server.loading", "mlx_paged.engine.service")
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(names))


@pytest.mark.slow
def test_a_server_that_is_open_to_others_without_a_key_warns(caplog):
    with live("--host", "0.0.0.0"):
        assert "0.0.0.0 is open to others" in caplog.text
    caplog.clear()
    with live("--host", "0.0.0.0", "--api-key", "secret"), live():
        assert "open to others" not in caplog.text


def test_a_missing_extra_is_one_line():
    code = (
        "import sys; sys.modules['prometheus_client'] = None;"
        "from mlx_paged.server.__main__ import main; sys.exit(main(['--port', '0']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "pip install '.[server]' in a clone" in ended.stderr
