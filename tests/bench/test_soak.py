"""The soak: arguments, what it counts, and the JSON line; never the times."""

import json

import pytest

from mlx_paged import Engine, demo_model_path
from mlx_paged.loading import load_model
from scripts import soak


@pytest.mark.slow
def test_a_short_soak_serves_every_request_and_frees_every_block(capsys):
    report = soak.main(["--requests", "200", "--num-blocks", "24", "--per-step", "3"])
    *tenths, last = capsys.readouterr().out.splitlines()
    printed = json.loads(last)
    assert len(tenths) == 10 and printed == report
    assert 200 <= report["requests"] < 205 and report["leaked_blocks"] == 0
    assert min(report["tokens"], report["aborts"], report["cached_tokens"]) > 0
    assert abs(report["active_growth_bytes"]) < 100_000


@pytest.mark.slow
def test_a_model_with_a_chat_template_gets_chats(tmp_path, capsys, monkeypatch):
    for path in demo_model_path().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    seen, add_request = [], Engine.add_request
    monkeypatch.setattr(
        Engine, "add_request", lambda *args, **kw: seen.append(args[1]) or add_request(*args, **kw)
    )
    report = soak.main(["--model", str(tmp_path), "--requests", "20", "--num-blocks", "128"])
    assert 20 <= report["requests"] < 25 and report["leaked_blocks"] == 0
    encode = load_model()[1].encode
    assert len(seen) > 10
    assert all(prompt[:3] == encode("# user: ")[:3] for prompt in seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "9"], "--requests: expected a whole number >= 10, got '9'"),
        (["--per-step", "0"], "--per-step: expected a number from 0.01 to 100, got '0'"),
        (["--num-blocks", "15"], "--num-blocks: expected a whole number >= 16, got 15"),
        (["--model", "huge"], "--model: expected reference, many-kv-heads, tiny or a directory"),
        (["--model", ".", "--num-blocks", "63"], "expected a whole number >= 64, got 63"),
        (["--model", "tests"], "scripts.soak: error: model tests: it has no config.json"),
        (["--model", str(demo_model_path())], "expected a model with a chat template"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named_in_one_line(capsys, options, message):
    with pytest.raises(SystemExit) as exit_:
        soak.main(options)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
