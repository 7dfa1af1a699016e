"""Named workloads, drawn from a seed; when their requests are due; and who sends them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from bench.models import successors
from bench.serving.trace import Job, Trace

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens of each prompt and each output."""

Draw = Callable[[np.random.Generator, int], Lengths]

GIANT_PROMPT = 8192
AGENT_PROMPT = 4096
AGENTS = 16
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
    arrivals_s: tuple[float, ...] = ()  # of all requests, if they do not follow a rate
    agents: int = 0  # take turns: each prompt continues the agent's last one
    edits: float | None = None  # prompts are the model's own text with this share of edits


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


BEHIND = "short-behind-long"
STREAMS, LONG, SHORT = (8, 64, 600), (4, 4500, 16), (4, 128, 32)
"""Of :data:`BEHIND`: requests, prompt tokens, output tokens. The others arrive a second later."""


def _short_behind_long(rng: np.random.Generator, count: int) -> Lengths:
    counts, prompts, outputs = zip(STREAMS, LONG, SHORT, strict=True)
    return np.repeat(prompts, counts), np.repeat(outputs, counts)


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
    "short-answers": Preset(
        "prompts of 8 tokens, outputs of 4, for slow engines",
        16,
        _uniform((8, 9), (4, 5)),
    ),
    "long-tail-chat": Preset(
        "log-normal lengths: many short requests, a few long ones", 64, _long_tail
    ),
    "shared-system-prompt": Preset(
        f"all prompts begin with the same {SYSTEM_PROMPT} tokens",
        64,
        _uniform((8, 65), (16, 65)),
        shared=SYSTEM_PROMPT,
    ),
    "agent": Preset(
        f"prompts of {AGENT_PROMPT} tokens, outputs of 8 to 31",
        8,
        _uniform((AGENT_PROMPT, AGENT_PROMPT + 1), (8, 32)),
    ),
    "agent-turns": Preset(
        f"{AGENTS} agents with several turns; each turn adds 256 to 511 tokens to the prompt",
        128,
        _uniform((256, 512), (16, 33)),
        model="reference",
        agents=AGENTS,
    ),
    "one-giant-prompt": Preset(
        f"one prompt of {GIANT_PROMPT} tokens among short ones", 24, _one_giant
    ),
    "copy": Preset(
        "a copying model repeats prompts of 256 to 511 tokens, a sixteenth of them edited",
        32,
        _uniform((256, 512), (128, 384)),
        model="copying",
        edits=1 / 16,
    ),
    "fork-heavy": Preset(
        "eight samples of each prompt", 12, _uniform((64, 257), (16, 65)), samples=8
    ),
    BEHIND: Preset(
        "8 streams, then 4 prompts of 4500 tokens, then 4 of 128; then without the long prompts",
        16,
        _short_behind_long,
        model="reference",
        arrivals_s=(0.0,) * STREAMS[0] + (1.0,) * (LONG[0] + SHORT[0]),
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
