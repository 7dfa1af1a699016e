"""Named workloads, drawn from a seed; when their requests are due; and who sends them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bench.serving.trace import Job, Trace

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens of each prompt and each output."""

Draw = Callable[[np.random.Generator, int], Lengths]

GIANT_PROMPT = 8192
AGENT_PROMPT = 4096
SYSTEM_PROMPT = 256


@dataclass(frozen=True)
class Preset:
    """A kind of workload."""

    about: str  # for the help
    requests: int  # how many by default
    draw: Draw  # draws the lengths of so many requests
    model: str = "demo"  # its default, as --model takes it
    shared: int = 0  # tokens that all prompts begin with, in addition to the drawn length
    samples: int = 1  # completions of each prompt
    contexts: int = 0  # so many conversations in turns: a prompt begins with its last one


def _uniform(prompts: tuple[int, int], outputs: tuple[int, int]) -> Draw:
    """Whole numbers from the first to below the second of each pair."""
    return lambda rng, count: (
        rng.integers(*prompts, size=count),
        rng.integers(*outputs, size=count),
    )


def _long_tail(rng: np.random.Generator, count: int) -> Lengths:
    prompts = rng.lognormal(np.log(64), 1.0, count).astype(np.int64)
    outputs = rng.lognormal(np.log(48), 0.8, count).astype(np.int64)
    return np.clip(prompts, 8, 1024), np.clip(outputs, 4, 512)


def _one_giant(rng: np.random.Generator, count: int) -> Lengths:
    prompts, outputs = _uniform((32, 129), (64, 129))(rng, count)
    prompts[count // 4] = GIANT_PROMPT
    outputs[count // 4] = 16
    return prompts, outputs


PRESETS: dict[str, Preset] = {
    "reference": Preset(
        "prompts of 32 to 511 tokens, outputs of 32 to 191, on the reference model",
        96,
        _uniform((32, 512), (32, 192)),
        model="reference",
    ),
    "uniform": Preset(
        "prompts of 32 to 256 tokens, outputs of 16 to 64", 64, _uniform((32, 257), (16, 65))
    ),
    "long-tail-chat": Preset("most are short, a few are long: log-normal lengths", 64, _long_tail),
    "shared-system-prompt": Preset(
        f"all prompts begin with the same {SYSTEM_PROMPT} tokens",
        64,
        _uniform((8, 65), (16, 65)),
        shared=SYSTEM_PROMPT,
    ),
    "agent": Preset(
        f"{AGENT_PROMPT} tokens in, 8 to 31 out",
        8,
        _uniform((AGENT_PROMPT, AGENT_PROMPT + 1), (8, 32)),
    ),
    "agent-turns": Preset(
        "16 agents in turns, 8 turns of 256 to 511 new tokens each",
        128,
        _uniform((256, 512), (16, 33)),
        model="reference",
        contexts=16,
    ),
    "one-giant-prompt": Preset(
        f"one prompt of {GIANT_PROMPT} tokens among short ones", 24, _one_giant
    ),
    "fork-heavy": Preset(
        "eight samples of each prompt", 12, _uniform((64, 257), (16, 65)), samples=8
    ),
}


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
    before = [tuple(shared)] * max(1, preset.contexts)
    jobs = []
    for i, (num_prompt, num_output) in enumerate(zip(*lengths, strict=True)):
        place = i % len(before)
        prompt = (*before[place], *ids.integers(vocab_size, size=num_prompt).tolist())
        if preset.contexts:
            before[place] = prompt
        jobs.append(Job(0.0, prompt, int(num_output), preset.samples))
    return jobs


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
