"""The table of options, the keywords of ``Engine``, the flags and the documents agree."""

import argparse
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from typing import get_type_hints

import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.generate.flags import make_parser as make_generate_parser
from mlx_paged.loading import engine_options
from mlx_paged.option_kinds import Choice, Kind, Name, OnOff, Path
from mlx_paged.options import DEFAULTS, GUESSERS, OPTIONS, EngineConfig, PoolConfig
from mlx_paged.runner.drafting import DRAFTERS
from mlx_paged.server.flags import make_parser as make_server_parser
from mlx_paged.terminal.flags import make_parser as make_chat_parser
from scripts.option_table import ARGUMENTS, MODULE, PAGE, TABLE, arguments, table

PARSERS = {
    "generate": make_generate_parser,
    "server": make_server_parser,
    "chat": make_chat_parser,
}
OWN_DEFAULTS = {("server", "max_stall_ms"): 150.0, ("server", "policy"): "fair"}
"""Defaults that a command has otherwise than the engine, by the command and the option."""


def flags(command: str) -> dict[str, argparse.Action]:
    """The flags of a command that give options, by the names of the options."""
    return {a.dest: a for a in PARSERS[command]()._actions if a.dest in OPTIONS}


def test_the_keywords_of_an_engine_are_those_of_the_table():
    keywords = [p for p in signature(Engine).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert {p.name: p.default for p in keywords} == DEFAULTS
    hints = get_type_hints(EngineConfig, localns={"nn": nn})
    assert {p.name: p.annotation for p in keywords} == {p.name: hints[p.name] for p in keywords}
    assert OPTIONS.keys() == hints.keys()


def test_the_documents_are_those_of_the_table():
    """``python -m scripts.option_table`` writes them."""
    assert TABLE.findall(PAGE.read_text()) == [table()]
    assert ARGUMENTS.findall(MODULE.read_text()) == [arguments()]
    assert all(name in arguments() and f"| `{name}` |" in table() for name in OPTIONS)


def test_every_name_of_a_guesser_has_one():
    assert tuple(DRAFTERS) == GUESSERS


@pytest.mark.parametrize("name", [n for n in OPTIONS if type(OPTIONS[n].kind) is not Kind])
def test_a_wrong_value_of_each_option_is_named(name):
    for value in (object(), float("nan"), -1, np.array([1, 2]), b"x", [object()], {"a": 1}):
        with pytest.raises(ValueError, match=rf"^\[Engine\] {name} is .*: expected") as error:
            EngineConfig(**{name: value})
        assert len(str(error.value)) < 250 and "\n" not in str(error.value)


def test_options_of_a_pool_go_to_another_pool():
    config = EngineConfig(max_running=np.int64(3), kv_bits="8,8")
    assert type(config.max_running) is int and config.kv_bits == 8
    other = config.of_pool(num_blocks=7)
    assert type(other) is PoolConfig and other.num_blocks == 7 and other.max_running == 3
    assert {f.name for f in fields(PoolConfig)} < OPTIONS.keys()


@pytest.mark.parametrize("command", PARSERS)
def test_a_command_without_flags_gives_the_defaults_of_the_engine(command):
    args = PARSERS[command]().parse_args([])
    options = engine_options(args)
    assert {"kv_memory", "max_stall_ms", "policy", "prefix_cache", "seed"} <= options.keys()
    for name in options.keys() - {"model_files"}:
        assert options[name] == OWN_DEFAULTS.get((command, name), DEFAULTS[name]), name


@pytest.mark.parametrize("command", PARSERS)
def test_the_flag_of_an_option_reads_values_of_its_kind(command, capsys):
    found = flags(command)
    assert len(found) > 15
    for name, action in found.items():
        kind, flag = OPTIONS[name].kind, action.option_strings[0]
        if isinstance(kind, OnOff):
            value = not DEFAULTS[name]
            given = [text for text in action.option_strings if text.startswith("--no-") != value]
            args = PARSERS[command]().parse_args(given[:1])
            assert getattr(args, name) is value
            continue
        if isinstance(kind, Path) or type(kind) is Kind:
            assert getattr(PARSERS[command]().parse_args([flag, "x"]), name) == "x"
            continue
        with pytest.raises(SystemExit) as end:
            PARSERS[command]().parse_args([flag, "x"])
        assert end.value.code == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and f"argument {'/'.join(action.option_strings)}" in message
        if isinstance(kind, Choice | Name):
            assert "choose from" in message
        elif action.choices is None:
            assert "expected" in message and "'x'" in message


def test_generate_has_every_flag_of_the_table():
    expected = {name for name, option in OPTIONS.items() if option.flag is not None}
    assert flags("generate").keys() == expected


@pytest.mark.parametrize("path", ["options", "server.flags", "generate.flags", "terminal.flags"])
def test_the_table_and_the_flags_import_no_mlx(path):
    code = f"import sys, mlx_paged.{path}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "mlx_paged" in loaded and not loaded & {"mlx", "mlx_lm", "numpy", "transformers"}
