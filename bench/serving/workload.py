"""Named workloads, drawn from a seed; when their requests are due; and who sends them."""

from collections import deque
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from bench.flags.presets import Lengths, Preset
from bench.models import successors
from bench.serving.trace import Job, Trace


def make_jobs(
    preset: Preset,
    vocab_size: int,
    seed: int,
    requests: int | None = None,
    tokens_target: int | None = None,
) -> list[Job]:
    """Draw a workload of `requests`, or of as many as `tokens_target` output tokens need.

    Token ids are below `vocab_size`. All jobs are due at once.
    """
    if tokens_target is None:
        lengths = preset.draw(np.random.default_rng(seed), requests or preset.requests)
    else:
        lengths = _enough(preset, seed, tokens_target)
    ids = np.random.default_rng([seed, 2])
    shared = ids.integers(vocab_size, size=preset.shared).tolist()
    jobs: list[Job] = []
    for num_prompt, num_output in zip(*lengths, strict=True):
        prompt = (*shared, *ids.integers(vocab_size, size=num_prompt).tolist())
        if len(jobs) >= preset.agents > 0:
            prompt = (*jobs[-preset.agents].prompt, *prompt)
        if preset.edits is not None:
            prompt = _edited(prompt, ids.random(num_prompt) < preset.edits, vocab_size)
        jobs.append(Job(0.0, prompt, int(num_output), preset.samples))
    return jobs


def _edited(
    others: tuple[int, ...], is_edited: NDArray[np.bool_], vocab_size: int
) -> tuple[int, ...]:
    """A copying model's text from a random token on, some tokens of which are replaced, left out or
    preceded by another. It ends with its first tokens, so that the model's text repeats it."""
    following = successors(vocab_size)
    text = list(accumulate(others, lambda token, _: following[token]))
    edits = [((b,), (), (b, a))[b % 3] for a, b in zip(text, others, strict=True)]
    edited = [e if flag else (a,) for a, e, flag in zip(text, edits, is_edited, strict=True)]
    return (*text[:4], *chain.from_iterable(edited[4:-4]), *text[:4])


def _enough(preset: Preset, seed: int, tokens_target: int) -> Lengths:
    count = 16
    while True:
        prompts, outputs = preset.draw(np.random.default_rng(seed), count)
        totals = list(accumulate((preset.samples * outputs).tolist()))
        if totals[-1] >= tokens_target:
            needed = 1 + next(i for i, total in enumerate(totals) if total >= tokens_target)
            return prompts[:needed], outputs[:needed]
        count *= 2


def arrival_times(
    count: int, rate: float | None, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds after the start, ascending; the first request is due at 0.

    The gaps are gamma distributed with the shape `burstiness`. With the same seed and burstiness,
    another rate only scales them.

    Args:
        rate: requests a second on average; None: all at once.
        burstiness: 1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly.
    """
    if rate is None:
        return [0.0] * count
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / burstiness, count) / rate
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times


class OpenLoop:
    """Jobs are due at their times, whether or not the engine keeps up.

    Latencies count from the scheduled time. So the time that a job waits because the engine is
    busy counts too (no coordinated omission).
    """

    def __init__(self, trace: Trace) -> None:
        self._jobs = deque(trace)

    @property
    def is_empty(self) -> bool:
        return not self._jobs

    def due(self, now_s: float) -> list[tuple[float, Job]]:
        """Jobs to submit now, each with the time from which its latencies count."""
        jobs = []
        while self._jobs and self._jobs[0].arrival_s <= now_s:
            job = self._jobs.popleft()
            jobs.append((job.arrival_s, job))
        return jobs

    def next_s(self) -> float:
        """When the next job is due, while no job runs."""
        return self._jobs[0].arrival_s

    def completed(self) -> None:
        """A job has ended."""


class ClosedLoop(OpenLoop):
    """So many clients, each of which sends its next job when its last one has ended."""

    def __init__(self, trace: Trace, clients: int) -> None:
        super().__init__(trace)
        self._idle = clients

    def due(self, now_s: float) -> list[tuple[float, Job]]:
        count = min(self._idle, len(self._jobs))
        self._idle -= count
        return [(now_s, self._jobs.popleft()) for _ in range(count)]

    def next_s(self) -> float:
        return 0.0

    def completed(self) -> None:
        self._idle += 1
