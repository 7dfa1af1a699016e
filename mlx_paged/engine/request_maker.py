"""Makes requests of checked arguments. Knows no mlx."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from mlx_paged.arguments import integer, is_real, require, require_flags, require_text
from mlx_paged.constraint import Constraint, Constraints
from mlx_paged.engine.text import PromptEncoder, PromptLike
from mlx_paged.prompt import Prompt
from mlx_paged.request import BACKGROUND, Request, Variant
from mlx_paged.sampling_params import WEEK, SamplingParams, is_within


def checked_params(
    caller: str,
    params: SamplingParams | None,
    options: dict[str, Any],
    encoder: PromptEncoder,
    prompt: PromptLike = (),
) -> SamplingParams:
    """`params`, or new ones made of `options`. The completion of a text keeps its first space,
    unless `keep_space` says otherwise. Raises ValueError if both are given, or if the tokenizer or
    the model's token ids do not allow them."""
    if params is not None and options:
        raise ValueError(f"[{caller}] both params and options are given: expected one")
    params = SamplingParams(**options) if params is None else params
    is_params = isinstance(params, SamplingParams)
    require(is_params, caller, "params", params, "SamplingParams or None")
    if params.stop and encoder.tokenizer is None:
        raise ValueError(f"[{caller}] stop strings are given: expected a tokenizer")
    encoder.ids.check_params(params)
    if params.keep_space is None and isinstance(prompt, str):
        return replace(params, keep_space=True)
    return params


class Queueing(NamedTuple):
    """How a request waits, and with which requests it shares K/V: fields of :class:`Request`."""

    priority: int
    is_background: bool
    salt: bytes
    share: tuple[str, ...]
    turn_ends: tuple[int, ...] = ()
    marks: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, request: Request) -> "Queueing":
        """How `request` waits, for requests that continue it: they have turns and marks of their
        own."""
        return cls(request.priority, request.is_background, request.salt, request.share)


def check_queueing(
    caller: str,
    *,
    priority: object,
    cache_salt: object,
    share: Sequence[str],
    turn_ends: Sequence[int] = (),
    keep: object = False,
    marks: Sequence[tuple[int, float]] = (),
) -> Queueing:
    """The arguments as fields of a request; ValueError unless all are of the right kind."""
    is_background = isinstance(priority, str) and priority == BACKGROUND
    is_ordered = is_real(priority) and priority == priority  # NaN has no order
    expected = f'a number or "{BACKGROUND}"'
    require(is_background or is_ordered, caller, "priority", priority, expected)
    require_text(caller, "cache_salt", cache_salt)
    require_flags(caller, keep=keep)
    is_share = isinstance(share, Sequence) and not isinstance(share, str)
    is_share = is_share and all(isinstance(name, str) and name for name in share)
    require(is_share, caller, "share", share, "a sequence of names that are not empty")
    require(isinstance(turn_ends, Sequence), caller, "turn_ends", turn_ends, "a sequence")
    ends = tuple(integer(caller, "turn_ends", each, 0) for each in turn_ends)
    for stop, seconds in marks:
        integer(caller, "marks", stop, 0)
        is_time = is_within(seconds, 0, WEEK)
        require(is_time, caller, "marks", seconds, f"numbers of tokens, and seconds up to {WEEK}")
    number, salt = 0 if is_background else priority, str(cache_salt).encode()
    return Queueing(cast(int, number), is_background, salt, tuple(share), ends, tuple(marks))


def _no_variant(name: str | None) -> None:
    """ValueError if a request asks for an adapter."""
    expected = "None: the engine has no adapters"
    require(name is None, "SamplingParams", "adapter", name, expected)


class RequestMaker:
    """Makes requests: gives each one the next id, a seed, its arrival time and its constraint.

    Attributes:
        constraints: makes the constraints that options ask for.
        variant_of: what is added to the model for requests with this name of an adapter.
    """

    variant_of: Callable[[str | None], Variant | None]

    def __init__(
        self,
        constraints: Constraints,
        clock: Callable[[], float],
        seed: int | None,
    ) -> None:
        self.variant_of = _no_variant
        self.constraints = constraints
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._next_id = 0

    def __call__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int | None,
        queueing: Queueing,
        logprobs: Sequence[float] = (),
        like: Request | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """A request of a prompt.

        Args:
            seed: of the request's random stream; None: a random one.
            logprobs: of the last tokens of the prompt, which are generated ones.
            like: the request that this one continues, with the same adapter; None: it continues
                none.
            constraint: what the tokens follow; None: a new one, if `params` ask for one.

        Raises:
            ValueError: the constraint cannot be followed, or there is no such adapter.
        """
        variant = self.variant_of(params.adapter) if like is None else like.variant
        if like is not None and params.adapter not in (None, variant and variant.name):
            expected = "None, or that of the request that it continues"
            require(False, "SamplingParams", "adapter", params.adapter, expected)
        seed = int(self._rng.integers(2**63)) if seed is None else seed
        request = Request(
            self._next_id,
            [*prompt.tokens],
            params,
            seed,
            queueing.priority,
            queueing.salt,
            prompt=None if prompt.is_plain else prompt,
            variant=variant,
            share=queueing.share,
            is_background=queueing.is_background,
            turn_ends=queueing.turn_ends,
            marks=queueing.marks,
            num_prompt=len(prompt) - len(logprobs),
            logprobs=[*logprobs],
        )
        request.constraint = constraint or self.constraints.start(params, len(prompt))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(prompt)
        request.arrival_time = self._clock()
        self._next_id += 1
        return request
