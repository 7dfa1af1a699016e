"""Named workloads: lengths and prompts drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bench.serving.trace import Job

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens of each prompt and each output."""

Draw = Callable[[np.random.Generator, int], Lengths]

GIANT_PROMPT = 8192
AGENT_PROMPT = 4096
SYSTEM_PROMPT = 256


@dataclass(frozen=True)
class Preset:
    """A kind of workload.

    Attributes:
        about: in a few words, for the help.
        requests: how many, unless asked otherwise.
        draw: lengths of so many requests.
        model: what it is meant for, as ``--model`` takes it.
        shared: tokens that all prompts begin with, beyond the drawn length.
        samples: completions of each prompt.
    """

    about: str
    requests: int
    draw: Draw
    model: str = "demo"
    shared: int = 0
    samples: int = 1


def _uniform(prompts: tuple[int, int], outputs: tuple[int, int]) -> Draw:
    """Whole numbers from the first to below the second of each pair."""

    def draw(rng: np.random.Generator, count: int) -> Lengths:
        return rng.integers(*prompts, size=count), rng.integers(*outputs, size=count)

    return draw


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
    """Draw a workload; every job is due at once.

    Args:
        vocab_size: token ids are below it.
        requests: how many; default the preset's.
        tokens_target: instead, as many as it takes for so many output tokens.
    """
    if tokens_target is None:
        lengths = preset.draw(np.random.default_rng(seed), requests or preset.requests)
    else:
        lengths = _enough(preset, seed, tokens_target)
    ids = np.random.default_rng([seed, 2])
    shared = ids.integers(vocab_size, size=preset.shared).tolist()
    return [
        Job(
            0.0,
            (*shared, *ids.integers(vocab_size, size=num_prompt).tolist()),
            int(num_output),
            preset.samples,
        )
        for num_prompt, num_output in zip(*lengths, strict=True)
    ]


def _enough(preset: Preset, seed: int, tokens_target: int) -> Lengths:
    count = 16
    while True:
        prompts, outputs = preset.draw(np.random.default_rng(seed), count)
        totals = list(accumulate((preset.samples * outputs).tolist()))
        if totals[-1] >= tokens_target:
            needed = 1 + next(i for i, total in enumerate(totals) if total >= tokens_target)
            return prompts[:needed], outputs[:needed]
        count *= 2
