"""mlx_paged chat: turns, commands, Ctrl-C, mistakes."""

import io
import sys

import pytest

from mlx_paged.engine.engine import Engine
from mlx_paged.terminal.__main__ import main

pytest_plugins = ["tests.support.commands.generate_fixtures"]

FLAGS = ("--kv-memory", "0.02", "-m", "6")


@pytest.fixture
def chat(monkeypatch, capsys, chat_model):
    """Type lines into a chat. Returns its status, stdout and stderr, and the messages of each
    request."""

    def chat(*lines, flags=(), on_output=None):
        seen, stream = [], Engine.stream_chat

        def recording(engine, messages, **options):
            seen.append([dict(message) for message in messages])
            outputs = stream(engine, messages, **options)

            def watched(first=seen[-1][0]):
                for output in outputs:
                    first["cached"] = output.cached_prompt_tokens
                    if on_output is not None:
                        on_output(output)
                    yield output

            return watched()

        monkeypatch.setattr(Engine, "stream_chat", recording)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        try:
            status = main(["--model", str(chat_model), *FLAGS, *flags])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr(), seen

    return chat


def said(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_an_answer_follows_what_was_said_before(chat):
    status, out, err, (first, second) = chat("x = 1", "y = 2", "q", "z = 3")
    assert (status, err) == (0, "")
    assert said(first) == [("user", "x = 1")]
    (answer,) = [content for role, content in said(second) if role == "assistant"]
    assert said(second) == [("user", "x = 1"), ("assistant", answer), ("user", "y = 2")]
    assert answer and out.startswith(answer) and len(out.splitlines()) >= 2


def test_the_chat_so_far_is_not_computed_again(chat):
    long = "def read_lines(path): return open(path).read() " * 4
    _, _, _, (first, second) = chat(long, "y = 2")
    assert first[0]["cached"] == 0 and second[0]["cached"] >= 32


def test_a_chat_can_begin_anew(chat):
    system = ["--system-prompt", "be short"]
    _, _, _, (first, second) = chat("x = 1", "r", "", "y = 2", flags=system)
    assert said(first) == [("system", "be short"), ("user", "x = 1")]
    assert said(second) == [("system", "be short"), ("user", "y = 2")]


def test_commands_of_other_chats_are_commands_too(chat):
    status, out, err, (first, second) = chat("x = 1", "/help", "/clear", "y = 2", "/bye", "z = 3")
    assert (status, err) == (0, "") and "r: begin a new chat" in out
    assert [said(first), said(second)] == [[("user", "x = 1")], [("user", "y = 2")]]


def test_an_unknown_command_is_no_message_and_a_path_is(chat):
    _, _, err, (only,) = chat("/hlep", "/etc/hosts: what is it?")
    assert err == "error: /hlep is no command (did you mean /help?)\n"
    assert said(only) == [("user", "/etc/hosts: what is it?")]


def test_ctrl_c_stops_the_answer_only(chat):
    left = iter(range(2))

    def interrupt(output):
        if next(left, None) is None and next(once, None) is not None:
            raise KeyboardInterrupt

    once = iter([1])
    status, out, _, (_, second) = chat("x = 1", "y = 2", on_output=interrupt)
    assert status == 0 and "(stopped)" in out
    assert [role for role, _ in said(second)] == ["user", "assistant", "user"]


def test_a_message_that_is_refused_is_forgotten(chat):
    status, _, err, seen = chat("x " * 20_000, "y = 2")
    assert status == 0 and err.count("\n") == 1 and err.startswith("error: ") and "[" not in err
    assert said(seen[-1]) == [("user", "y = 2")]


def test_help_says_that_a_model_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "a chat model; required" in out and "demo model" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", ""], "--model is not given"),
        (["--pipeline"], "--pipeline: refused: mlx.launch divides layers"),
        (["--chat-template-config", "[]"], "expected a JSON object"),
        (["--max-token", "x"], "expected a whole number"),
    ],
)
def test_a_mistake_is_one_line(chat, flags, message):
    status, _, err, seen = chat("x", flags=flags)
    assert status == 2 and err.count("\n") == 1 and message in err
    assert seen == []


def test_a_model_without_a_template_is_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    from mlx_paged import demo_model_path

    with pytest.raises(SystemExit):
        main(["--model", str(demo_model_path()), "--kv-memory", "0.02"])
    assert "has no chat template: expected a chat model" in capsys.readouterr().err
