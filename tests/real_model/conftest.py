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
from filelock import FileLock

from mlx_paged import Engine
from mlx_paged.loading import load_model

SAID_BY_MLX_LM = (0, 3)  # numbers of questions
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
def answers(directory, float32, prompts, tmp_path_factory, request) -> list[list[int]]:
    """mlx-lm's greedy tokens in float32, each chat alone. One worker of pytest-xdist asks for
    them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    file = folder / "answers.json"
    with FileLock(folder / "answers.lock"):
        if not file.exists():
            begin = time.perf_counter()
            found = mlx_lms_answers(directory, float32, prompts, tmp_path_factory.mktemp("answers"))
            file.write_text(json.dumps(found))
            has_blas = mlx_lm_answers.has_openblas()
            blas = "with OpenBLAS" if has_blas else "without OpenBLAS, which is slow"
            seconds = time.perf_counter() - begin
            request.config.stash[SAID] = f"mlx-lm's answers in float32 took {seconds:.0f} s {blas}"
        return json.loads(file.read_text())


def mlx_lms_answers(directory, float32, prompts, folder: Path) -> list[list[int]]:
    """The tokens that mlx-lm says to each chat.

    An engine proposes them. mlx-lm's model finds each of them the likeliest behind the tokens
    before it, so it would say the same. For two chats mlx-lm says them itself.
    """
    engine = Engine(*float32, num_blocks=400, max_running=16)
    limit = mlx_lm_answers.LIMIT
    completions = engine.generate(prompts, max_tokens=limit, temperature=0.0)
    proposed = [completion.tokens for completion in completions]
    said = folder / "said.json"
    jobs = [mlx_lm_answers.start("tokens", directory / "float32", said, *SAID_BY_MLX_LM)]
    rows = [*zip(prompts, proposed, strict=True)]
    (folder / "rows.json").write_text(json.dumps(rows))
    found = folder / "likeliest.json"
    model = directory / "float32"
    jobs += [mlx_lm_answers.start("likeliest", model, found, folder / "rows.json")]
    mlx_lm_answers.ended(jobs)
    assert json.loads(found.read_text()) == proposed
    expected = {str(number): proposed[number] for number in SAID_BY_MLX_LM}
    assert json.loads(said.read_text()) == expected
    ends = float32[1].eos_token_ids
    assert all(len(tokens) == limit or tokens[-1] in ends for tokens in proposed)
    return proposed


def pytest_terminal_summary(terminalreporter, config) -> None:
    if SAID in config.stash:
        terminalreporter.write_line(config.stash[SAID])
