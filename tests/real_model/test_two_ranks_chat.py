"""Three processes that share the model say what one says. Two cannot share its three K/V heads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chats import QUESTIONS

SHORT = (1, 3)  # numbers of questions
LIMIT = 16


@pytest.fixture
def launch(directory, tmp_path):
    """Run `mlx_paged.generate` on so many ranks."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = ({"messages": [{"role": "user", "content": QUESTIONS[n]}]} for n in SHORT)
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(num_ranks: int) -> tuple[str, Path]:
        mlx_launch = [str(Path(sys.executable).parent / "mlx.launch"), "--backend", "ring"]
        command = ["-m", "mlx_paged.generate", "--model", str(directory / "float32")]
        command += ["--prompts-file", str(prompts), "--output", str(out)]
        command += ["--max-tokens", str(LIMIT), "--kv-memory", "0.1"]
        done = subprocess.run(
            [*mlx_launch, "-n", str(num_ranks), "--", sys.executable, *command],
            capture_output=True,
            text=True,
            env=os.environ,
            timeout=300,
        )
        return done.stdout + done.stderr, out

    return run


def test_three_ranks_say_what_mlx_lm_says(launch, float32, answers):
    output, out = launch(3)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    ends, tokenizer = float32[1].eos_token_ids, float32[1]
    expected = [[t for t in answers[n][:LIMIT] if t not in ends] for n in SHORT]
    assert [line["text"] for line in found] == [tokenizer.decode(x) for x in expected], output


def test_two_ranks_are_refused_with_the_numbers_that_would_do(launch):
    output, out = launch(2)
    assert "2 ranks cannot divide them; expected 1 or 3" in output and not out.read_text()
