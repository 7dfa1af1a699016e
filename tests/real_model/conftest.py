"""A real chat model, as `python -m scripts.real_model DIR` makes it, and what mlx-lm says with it.

`REAL_MODEL_DIR` names the directory. Without it these tests are skipped; with it they must run.
"""

import json
import os
import time
from pathlib import Path

import mlx_lm_answers
import pytest
from chats import QUESTIONS, chat

from mlx_paged.cli import load_model

SAID = pytest.StashKey[str]()
REASON = "needs a real model: python -m scripts.real_model DIR, then REAL_MODEL_DIR=DIR"


@pytest.fixture(scope="session", autouse=True)
def directory() -> Path:
    """The directory of the model: `4bit`, `bfloat16` and `float32` are in it."""
    named = os.environ.get("REAL_MODEL_DIR")
    if named is None:
        pytest.skip(REASON)
    if not (Path(named) / "float32").is_dir():
        pytest.fail(f"REAL_MODEL_DIR is {named!r}: expected a directory of scripts.real_model")
    return Path(named).resolve()


@pytest.fixture(scope="session")
def float32(directory):
    """The model in float32 and its tokenizer."""
    return load_model(str(directory / "float32"))


@pytest.fixture(scope="session")
def prompts(float32) -> list[list[int]]:
    """Tokens of the chats."""
    return [chat(float32[1], question) for question in QUESTIONS]


@pytest.fixture(scope="session")
def answers(directory, tmp_path_factory, request) -> list[list[int]]:
    """mlx-lm's greedy tokens in float32, each chat alone; computed once, by two processes."""
    folder, begin = tmp_path_factory.mktemp("answers"), time.perf_counter()
    files = [folder / f"{part}.json" for part in range(2)]
    numbers = range(len(QUESTIONS))
    mlx_lm_answers.ended(
        [
            mlx_lm_answers.start("tokens", directory / "float32", file, *numbers[part::2])
            for part, file in enumerate(files)
        ]
    )
    found = {k: v for file in files for k, v in json.loads(file.read_text()).items()}
    blas = "with OpenBLAS" if mlx_lm_answers.has_openblas() else "without OpenBLAS, which is slow"
    seconds = time.perf_counter() - begin
    request.config.stash[SAID] = f"mlx-lm's answers in float32 took {seconds:.0f} s {blas}"
    return [found[str(number)] for number in numbers]


def pytest_terminal_summary(terminalreporter, config) -> None:
    if SAID in config.stash:
        terminalreporter.write_line(config.stash[SAID])
