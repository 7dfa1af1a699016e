"""--config: flags in a TOML or JSON file mean what they mean on the command line."""

import json
import re

import pytest

from mlx_paged.config_file import MOST_BYTES, names_of
from mlx_paged.generate import flags as generate_flags
from mlx_paged.server import flags as server_flags
from tests.support.documents import ROOT

PARSERS = {"generate": generate_flags.make_parser, "server": server_flags.make_parser}

SAME = [
    ({"max-tokens": 7, "max_running": 3}, "--max-tokens 7 --max-running 3"),
    ({"temp": 0.5, "kv-memory": 1, "seed": "9"}, "--temp 0.5 --kv-memory 1 --seed 9"),
    ({"prompt": ["-a", "b=c"]}, "--prompt=-a --prompt b=c"),
    ({"prompt": "a\nb"}, "--prompt a\nb"),
    ({"prompt": [], "stop": ["x"]}, "--stop x"),
    ({"image": ["a", "b"], "extra-eos-token": ["x", "y"]}, "--image a b --extra-eos-token x y"),
    ({"resume": True, "early-stopping": False, "verbose": "False"}, "--resume --verbose False"),
    ({"prefix-cache": False, "wired": False}, "--no-prefix-cache --no-wired"),
    ({"keep_space": True}, "--keep-space"),
    ({"prefix-cache": True}, ""),
    ({"adapter": {"a": "x", "b": "y"}}, "--adapter a=x --adapter b=y"),
    ({"chat-template-config": {"a": [1]}}, '--chat-template-config {"a":[1]}'),
]  # fmt: skip


def toml(settings):
    """The settings as TOML, whose strings and lists are those of JSON."""
    plain = {k: v for k, v in settings.items() if not isinstance(v, dict)}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in plain.items())
    for key, table in settings.items():
        if isinstance(table, dict):
            text += f"[{key}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items())
    return text


@pytest.mark.parametrize(("settings", "words"), SAME)
@pytest.mark.parametrize("write", [json.dumps, toml])
def test_a_file_means_the_command_line(settings, words, write, tmp_path):
    path = tmp_path / f"flags.{'toml' if write is toml else 'JSON'}"
    path.write_text(write(settings))
    found = vars(PARSERS["generate"]().parse_args(["--config", str(path)]))
    assert found.pop("config") == str(path)
    given = vars(PARSERS["generate"]().parse_args(words.split(" ") if words else []))
    assert given.pop("config") is None
    assert found == given


@pytest.mark.parametrize(
    ("settings", "words", "name", "expected"),
    [
        ({"max-tokens": 7}, ["-m", "8"], "max_tokens", 8),
        ({"max-tokens": 7}, ["--max-tokens", "100"], "max_tokens", 100),
        ({"prompt": ["a", "b"]}, ["-p", "c"], "prompt", ["c"]),
        ({"adapter": {"a": "x"}}, ["--adapter", "a=y"], "adapters", {"a": "y"}),
        ({"wired": True}, ["--no-wired"], "wired", False),
        ({"max-tokens": "none"}, ["-m", "8"], "max_tokens", 8),
    ],
)
def test_the_command_line_wins(settings, words, name, expected, tmp_path):
    (tmp_path / "f.json").write_text(json.dumps(settings))
    for order in (words, []), ([], words):
        words_of = [*order[0], f"--config={tmp_path / 'f.json'}", *order[1]]
        assert getattr(PARSERS["generate"]().parse_args(words_of), name) == expected


WRONG = {
    '{"max-token": 1}': r"'max-token' is no flag of mlx_paged.gen.* \(did you mean max-tokens\?\)",
    '{"no-prefix-cache": true}': r"'no-prefix-cache' is no flag .*\(did you mean prefix-cache\?\)",
    '{"config": "x.toml"}': r"'config' is no flag",
    '{"help": true}': r"'help' is no flag",
    '{"seed": 1, "seed": 2}': "'seed' is there twice",
    '{"max-tokens": 1, "max_tokens": 2}': "'max_tokens' is given twice",
    '{"resume": 1}': "resume is 1: expected true or false",
    '{"seed": true}': "seed is True: expected a number or a text, as after the flag",
    '{"seed": [1]}': r"seed is \[1\]: expected a number or a text",
    '{"model": null}': "model is None: expected",
    '{"model": "a\\u0000b"}': "model is .*: expected",
    '{"model": "\\ud800"}': "surrogates not allowed",
    '{"model": {"a": 1}}': r"model is \{'a': 1\}: expected",
    '{"prompt": [["a"]]}': r"prompt is \['a'\]: expected",
    '{"adapter": {"a": {}}}': r"adapter.a is \{\}: expected",
    '{"max-tokens": NaN}': "argument --max-tokens/-m: expected a whole number >= 1, got 'nan'",
    '{"min-tokens-to-keep": 2}': "argument --min-tokens-to-keep: refused: min-p keeps",
    '{"seed": ' + "9" * 5000 + "}": "Exceeds the limit",
    '{"extra-eos-token": ["-x"]}': "expected at least one argument",
    "[1]": "expected an object of flags",
    "{": "Expecting property name",
    "[" * 100_000: "nested too deep",
    '"' + "x" * MOST_BYTES + '"': f"expected at most {MOST_BYTES} bytes",
    "\xff": "can't decode byte",
}  # fmt: skip


def refusal(path, capsys, name="generate"):
    """The line of a command that refuses a file."""
    with pytest.raises(SystemExit) as caught:
        PARSERS[name]().parse_args(["--config", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith(f"mlx_paged.{name}: error: ") and str(path) in line
    return line


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "f.json"
    path.write_bytes(text.encode("latin-1"))
    assert re.search(WRONG[text], refusal(path, capsys))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\na = 2", "Cannot overwrite a value"),
        ("seed = 2026-01-01", "expected a number or a text"),
        ("kv-memory = inf", "expected a number of GB above 0, got 'inf'"),
        ("sed = 1", "did you mean seed"),
        ("seed 1", "Expected '='"),
        ("a = " + "[" * 100_000, "nested too deep"),
    ],
)
def test_wrong_toml_is_one_line(text, expected, tmp_path, capsys):
    path = tmp_path / "f.toml"
    path.write_text(text)
    assert expected in refusal(path, capsys, "server")


def test_a_file_that_is_none_is_one_line(tmp_path, capsys):
    assert "No such file" in refusal(tmp_path / "none.toml", capsys)
    (tmp_path / "f.yaml").touch()
    assert "ends with .toml or .json" in refusal(tmp_path / "f.yaml", capsys)
    (tmp_path / "d.toml").mkdir()
    assert "Is a directory" in refusal(tmp_path / "d.toml", capsys)


@pytest.mark.parametrize("name", PARSERS)
def test_every_flag_has_one_name(name):
    parser = PARSERS[name]()
    names = [name for action in parser._actions for name in names_of(action)]
    assert len(names) == len(set(names))
    without = [action.dest for action in parser._actions if not names_of(action)]
    assert sorted(without) == ["config", "help"]


def test_mistakes_after_the_file_do_not_name_it(tmp_path, capsys):
    """A later check knows only the value, which may be the command line's."""
    (tmp_path / "f.toml").write_text("prompt-cache-size = 3")
    with pytest.raises(SystemExit):
        server_flags.parse(["--config", str(tmp_path / "f.toml")])
    assert capsys.readouterr().err.startswith("mlx_paged.server: error: --prompt-cache-size: ")


def test_the_example_of_the_document_is_right(tmp_path):
    text = (ROOT / "docs/command-line.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "f.toml").write_text(example)
    for make in PARSERS.values():
        args = make().parse_args(["--config", str(tmp_path / "f.toml")])
        assert (args.max_tokens, args.kv_memory) == (200, 2_500_000_000)
        assert args.adapters == {"sql": "adapters/sql"}
