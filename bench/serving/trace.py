"""What is asked of an engine, and when; as objects and as JSON lines. Knows no engine."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace."""

    arrival_s: float  # when it is due, after the start of the run
    prompt: tuple[int, ...]  # token ids
    max_tokens: int  # output tokens of each sample; all of them are generated
    samples: int = 1  # completions of the prompt, each a stream of its own

    @property
    def output_tokens(self) -> int:
        return self.samples * self.max_tokens

    @property
    def kv_tokens(self) -> int:
        """K/V slots of one sample at its end; the last token's own K/V is never needed."""
        return len(self.prompt) + self.max_tokens - 1


KEYS = set(Job.__dataclass_fields__) | {"prompt_tokens"}

Trace = tuple[Job, ...]
"""Jobs in the order of their arrival."""


def make_trace(jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Trace:
    """The jobs, one at each of these times, which ascend."""
    return tuple(
        replace(job, arrival_s=float(time)) for job, time in zip(jobs, arrivals_s, strict=True)
    )


def digest(trace: Trace) -> str:
    """Equal for equal traces."""
    text = json.dumps([[j.arrival_s, j.prompt, j.max_tokens, j.samples] for j in trace])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_trace(path: Path, trace: Trace) -> None:
    """Write what :func:`read_trace` reads back unchanged."""
    with path.open("w", encoding="utf-8") as file:
        for job in trace:
            file.write(json.dumps(asdict(job)) + "\n")


def read_trace(path: Path, vocab_size: int, seed: int) -> Trace:
    """Read one job a line, e.g. ``{"arrival_s": 0.5, "prompt_tokens": 120, "max_tokens": 30}``.

    `prompt` gives token ids. `prompt_tokens` gives only their number; then they are drawn.
    `samples` is 1 unless given. Jobs are sorted by arrival.

    Raises:
        ValueError: names the file and the line that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(f"trace {path}: cannot be read ({reason})") from error
    rng = np.random.default_rng([seed, 2])
    jobs: list[Job] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            jobs.append(_job(json.loads(line), vocab_size, rng))
        except (ValueError, TypeError) as error:
            raise ValueError(f"trace {path}, line {number}: {error}") from error
    if not jobs:
        raise ValueError(f"trace {path}: expected at least one request, found none")
    return tuple(sorted(jobs, key=lambda job: job.arrival_s))


def _job(entry: Any, vocab_size: int, rng: np.random.Generator) -> Job:
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {entry!r}")
    if unknown := sorted(entry.keys() - KEYS):
        raise ValueError(f"unknown key {unknown[0]!r}, expected some of {', '.join(sorted(KEYS))}")
    arrival_s = entry.get("arrival_s")
    if not isinstance(arrival_s, int | float) or not 0 <= arrival_s < float("inf"):
        raise ValueError(f"arrival_s is {arrival_s!r}: expected seconds >= 0")
    if ("prompt" in entry) == ("prompt_tokens" in entry):
        raise ValueError("expected one of prompt and prompt_tokens")
    if "prompt" in entry:
        prompt = entry["prompt"]
        if not isinstance(prompt, list) or not prompt or not _are_ids(prompt, vocab_size):
            raise ValueError(f"prompt: expected token ids from 0 to {vocab_size - 1}")
    else:
        prompt = rng.integers(vocab_size, size=_count(entry, "prompt_tokens")).tolist()
    samples = _count(entry, "samples") if "samples" in entry else 1
    return Job(float(arrival_s), tuple(prompt), _count(entry, "max_tokens"), samples)


def _count(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}: expected a whole number >= 1")
    return value


def _are_ids(prompt: list[Any], vocab_size: int) -> bool:
    return all(type(token) is int and 0 <= token < vocab_size for token in prompt)
