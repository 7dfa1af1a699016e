"""A step that a runner has built: what the device computes already, and what has not begun."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.request import Request
from mlx_paged.runner.hidden_states import ForwardStates
from mlx_paged.sampling.prompt_scores import PromptScores
from mlx_paged.sampling.sampler import PendingTokens, Sampled, SamplerArguments
from mlx_paged.scheduler.step import StepReport


@dataclass(frozen=True, slots=True)
class Part:
    """Arrays of a step that begin together, before the arrays that follow them; then the prompt
    tokens of `scored` are scored by `logits`."""

    arrays: list[mx.array]
    scored: Sequence[tuple[Request, range]]
    logits: mx.array


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What of a step has not begun: `parts`, then its pending arrays. `thread` built it."""

    thread: int
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that the device is computing.

    Attributes:
        report: what has happened in it so far.
        requests: the requests that get a token.
        sampled: their tokens, which may not be computed yet; None if there are none, or not yet.
        pending: all arrays that the step computes.
        end: waits for the device and raises its error; None: its arrays raise it.
        scores: of prompt tokens.
        unsampled: arguments of the sampler, which waits until the step before has been read.
        coming: `sampled`'s tokens, as inputs of the next step.
        errors: why requests get no token, by index into `requests`, as far as it is known.
        held: what has not begun yet; None: all of the step has begun.
        hidden: the states that a head reads, of each forward.
    """

    report: StepReport
    requests: list[Request]
    sampled: Sampled | None
    pending: list[mx.array] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)
    end: Callable[[], None] | None = None
    unsampled: SamplerArguments | None = None
    coming: PendingTokens | None = None
    held: HeldBack | None = None
    errors: dict[int, Exception] = field(default_factory=dict)
    hidden: list[ForwardStates] = field(default_factory=list)
