"""A model's answers, and what its layers computed for them, on disk: what a head is trained on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import Engine, SamplingParams
from mlx_paged.runner.launched_step import LaunchedStep

PER_FILE = 48  # answers


class Example(NamedTuple):
    """Tokens of a prompt and its answer, and what the model computed for them.

    Attributes:
        tokens: ``[T]`` int32. The answer's last token, which the model never read, is not there.
        states: ``[T, W]`` float16, what the head reads, one state beside the other.
        last: ``[T, D]`` float16, the output of the final norm.
    """

    tokens: np.ndarray
    num_prompt: int
    states: np.ndarray
    last: np.ndarray


class Recorder:
    """Keeps the hidden states of an engine's steps until their request ends."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, np.ndarray]]] = {}

    def settled(self, launched: LaunchedStep) -> None:
        """Keep the states of a step. They are float16, one beside the other."""
        for found in launched.hidden:
            flat = [array.flatten(0, 1).astype(mx.float16) for array in found.arrays]
            rows = np.array(mx.concatenate(flat, axis=-1))
            for span, first in zip(found.spans, found.first_rows.tolist(), strict=True):
                own = rows[first : first + span.stop - span.start]
                self._rows.setdefault(span.request.id, []).append((span.start, own))

    def take(self, request_id: int) -> np.ndarray:
        """The states of a request that has ended, ``[T, W]``."""
        parts = self._rows.pop(request_id)
        found = np.zeros((max(s + len(rows) for s, rows in parts), parts[0][1].shape[1]), "f2")
        for start, rows in parts:
            found[start : start + len(rows)] = rows
        return found


def record(
    model: nn.Module,
    tokenizer: Any,
    head: Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    folder: Path,
) -> None:
    """Let an engine answer the prompts, and write examples to files of a folder as they end.

    Args:
        head: folder of a head that reads the states to write; the last one is the final norm's.
        params: with ``speculate=False``, so that the head guesses nothing.
    """
    engine = Engine(
        model, tokenizer, max_running=64, kv_memory=1 << 30, prefix_cache=False, draft_head=head
    )
    recorder, width = Recorder(), model.args.hidden_size
    engine.observers.settled.insert(0, recorder.settled)
    asked = {
        engine.add_request(prompt, each): i
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    }
    ended: list[tuple[int, Example]] = []
    folder.mkdir(parents=True, exist_ok=True)
    count = len(list(folder.glob("*.npz")))
    left = len(asked)
    while left:
        for output in engine.step():
            if output.completion is None:
                continue
            left -= 1
            number, rows = asked[output.request_id], recorder.take(output.request_id)
            tokens = np.array(prompts[number] + list(output.completion.tokens), np.int32)
            parts = rows[:, :-width], rows[:, -width:]
            ended.append((number, Example(tokens[: len(rows)], len(prompts[number]), *parts)))
        if len(ended) >= PER_FILE or (ended and not left):
            write(folder / f"{count:04d}.npz", ended)
            ended, count = [], count + 1


def write(path: Path, examples: Sequence[tuple[int, Example]]) -> None:
    """Write numbered examples to one file, which is there when it is whole."""
    numbers, found = zip(*examples, strict=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            numbers=np.array(numbers),
            prompts=np.array([each.num_prompt for each in found]),
            lengths=np.array([len(each.tokens) for each in found]),
            tokens=np.concatenate([each.tokens for each in found]),
            states=np.concatenate([each.states for each in found]),
            last=np.concatenate([each.last for each in found]),
        )
    partial.rename(path)


def read(path: Path) -> Iterator[tuple[int, Example]]:
    """The numbered examples of a file."""
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    stops = np.cumsum(data["lengths"])
    for i, stop in enumerate(stops):
        span = slice(stop - data["lengths"][i], stop)
        arrays = data["states"][span], data["last"][span]
        yield (
            int(data["numbers"][i]),
            Example(data["tokens"][span], int(data["prompts"][i]), *arrays),
        )
