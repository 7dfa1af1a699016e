"""What mlx-lm alone says to the questions: greedy tokens and log-probabilities, in files.

    python tests/real_model/mlx_lm_answers.py {tokens,likeliest,patched,logprobs} ...

The tests run it in processes of their own: MLX's products are slow without OpenBLAS, which must be
preloaded before a process starts.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from chats import QUESTIONS, chat
from mlx_lm import batch_generate, load, stream_generate

import mlx_paged
from mlx_paged.attention.forward import path_counts

LIMIT = 128
OPENBLAS = "libopenblas.so.0"


def has_openblas() -> bool:
    try:
        ctypes.CDLL(OPENBLAS)
    except OSError:
        return False
    return True


def start(*arguments: object) -> subprocess.Popen[str]:
    """This script in a process with one thread for products; with OpenBLAS if it is there."""
    faster = {"LD_PRELOAD": OPENBLAS, "OPENBLAS_NUM_THREADS": "1"} if has_openblas() else {}
    command = [sys.executable, __file__, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | faster, stdout=pipe, stderr=pipe, text=True)


def ended(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for processes. Raises RuntimeError with what a failed one wrote to stderr."""
    try:
        for process in processes:
            _, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"mlx_lm_answers exits with {process.returncode}: {errors}")
    finally:
        for process in processes:
            process.kill()


def tokens(directory: str, out: str, *numbers: str) -> None:
    """Greedy tokens of the questions with these numbers, each alone."""
    model, tokenizer = load(directory)
    found = {}
    for number in map(int, numbers):
        prompt = chat(tokenizer, QUESTIONS[number])
        responses = stream_generate(model, tokenizer, prompt, max_tokens=LIMIT)
        found[number] = [response.token for response in responses]
    Path(out).write_text(json.dumps(found))


def likeliest(directory: str, out: str, rows: str) -> None:
    """The likeliest token behind each prefix, for each row as in `logprobs`. All prefixes of a row
    are one computation, which takes a tenth of the time of `tokens`."""
    model, _ = load(directory)
    found = []
    for prompt, following in json.loads(Path(rows).read_text()):
        logits = model(mx.array([prompt + following[:-1]]))[0, len(prompt) - 1 :]
        found.append(mx.argmax(logits, axis=-1).tolist())
    Path(out).write_text(json.dumps(found))


def patched(directory: str, out: str, limit: str, *numbers: str) -> None:
    """The same from mlx-lm's functions on paged caches: alone, and all in one batch."""
    model, tokenizer = load(directory)
    prompts = [chat(tokenizer, QUESTIONS[int(number)]) for number in numbers]
    with mlx_paged.patched_mlx_lm():
        responses = stream_generate(model, tokenizer, prompts[0], max_tokens=int(limit))
        alone = [response.token for response in responses]
        texts = batch_generate(model, tokenizer, prompts, max_tokens=int(limit)).texts
    Path(out).write_text(
        json.dumps({"alone": alone, "texts": texts, "paged": path_counts["paged"]})
    )


def logprobs(directory: str, out: str, rows: str) -> None:
    """Log-probabilities of the token behind each prefix: for each row of a prompt and what follows
    it, from its last prompt token on. One array of float32 for each row."""
    model, _ = load(directory)
    found = []
    for prompt, following in json.loads(Path(rows).read_text()):
        logits = model(mx.array([prompt + following[:-1]]))[0, len(prompt) - 1 :]
        logits = logits.astype(mx.float32)
        found.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    np.savez(out, *found)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    name, *arguments = sys.argv[1:]
    {"tokens": tokens, "likeliest": likeliest, "patched": patched, "logprobs": logprobs}[name](
        *arguments
    )
