"""Fixtures that run the generate command, and mlx-lm to compare with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import loading as model_loader
from mlx_paged.engine.engine import Engine
from mlx_paged.generate import command as generate
from mlx_paged.generate.__main__ import main
from tests.support.commands.generate_runs import Result, model_copy

CHAT_TEMPLATE = (
    "{% if messages[-1]['role'] == 'robot' %}{{ raise_exception('no robots here') }}{% endif %}"
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)

DEFAULTS = ("--kv-memory", "0.02", "--no-keep-space")

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def demo() -> tuple[nn.Module, TokenizerWrapper]:
    return model_loader.load_model()


@pytest.fixture
def run(demo, monkeypatch, capsys) -> Run:
    """The command in this process; the demo model is loaded once for all tests. Texts drop a first
    space, as mlx-lm's do."""

    def load_model(name: str | None = None, *args: Any) -> tuple[nn.Module, TokenizerWrapper]:
        return demo if name is None else model_loader.load_model(name, *args)

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            status = main([*DEFAULTS, *map(str, arguments)])
        except SystemExit as exit:
            status = exit.code
        except KeyboardInterrupt:
            pytest.fail("Ctrl-C was not caught")
        return Result(status, *capsys.readouterr())

    monkeypatch.setattr(generate, "load_model", load_model)
    return run


@pytest.fixture
def asked(demo, monkeypatch) -> list[str]:
    """The text of every prompt that reached an engine."""
    prompts: list[str] = []
    add_samples = Engine.add_samples

    def recording(engine: Engine, prompt: list[int], *args: Any, **options: Any) -> list[int]:
        prompts.append(demo[1].decode(prompt))
        return add_samples(engine, prompt, *args, **options)

    monkeypatch.setattr(Engine, "add_samples", recording)
    return prompts


@pytest.fixture(scope="session")
def expected(demo) -> Callable[..., str]:
    """What mlx-lm generates for a prompt alone."""
    known: dict[tuple[str, int], str] = {}

    def expected(prompt: str, max_tokens: int) -> str:
        if (prompt, max_tokens) not in known:
            known[prompt, max_tokens] = mlx_lm.generate(*demo, prompt, max_tokens=max_tokens)
        return known[prompt, max_tokens]

    return expected


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chat"
    return model_copy(path, tokenizer_config={"chat_template": CHAT_TEMPLATE})
