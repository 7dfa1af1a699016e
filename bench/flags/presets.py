"""Named workloads: how many requests, of which lengths. numpy is imported when they are drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Lengths = tuple["NDArray[np.int64]", "NDArray[np.int64]"]
"""Tokens of each prompt and each output."""

Draw = Callable[["np.random.Generator", int], Lengths]

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


def _long_tail(rng: "np.random.Generator", count: int) -> Lengths:
    import numpy as np

    prompts = rng.lognormal(np.log(64), 1.0, count).astype(np.int64)
    outputs = rng.lognormal(np.log(48), 0.8, count).astype(np.int64)
    return np.clip(prompts, 8, 1024), np.clip(outputs, 4, 512)


def _one_giant(rng: "np.random.Generator", count: int) -> Lengths:
    prompts, outputs = _uniform((32, 129), (64, 129))(rng, count)
    prompts[count // 4] = GIANT_PROMPT
    outputs[count // 4] = 16
    return prompts, outputs


def _each(prompt: int, output: int) -> Draw:
    """All requests alike."""
    return _uniform((prompt, prompt + 1), (output, output + 1))


BEHIND = "short-behind-long"
STREAMS, LONG, SHORT = (8, 64, 600), (4, 4500, 16), (4, 128, 32)
"""Of :data:`BEHIND`: requests, prompt tokens, output tokens. The others arrive a second later."""


def _short_behind_long(rng: "np.random.Generator", count: int) -> Lengths:
    import numpy as np

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
        _each(8, 4),
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
    "one-stream": Preset("one prompt of 1000 tokens, 128 output tokens", 1, _each(1000, 128)),
    "prompt-7k": Preset("one prompt of 7000 tokens, 32 output tokens", 1, _each(7000, 32)),
    "prompt-32k": Preset(
        "one prompt of 32000 tokens, 32 output tokens", 1, _each(32000, 32), model="reference"
    ),
    "few-chats": Preset("4 prompts of 400 tokens, 128 output tokens each", 4, _each(400, 128)),
    "many-chats": Preset("16 prompts of 100 tokens, 128 output tokens each", 16, _each(100, 128)),
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
