"""One sequence that the engine generates. Knows no mlx."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from mlx_paged.constraint import Constraint
from mlx_paged.kv.pins import Pinned
from mlx_paged.prompt import Prompt
from mlx_paged.sampling_params import SamplingParams

BACKGROUND = "background"
"""In place of the number of a priority: see `Request.is_background`."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # its logits processor failed or forbade all tokens, or the model failed


class PoolShrunkError(ValueError):
    """The pool is too small for a request while memory is short; its configured size would do."""


class PromptLogprob(NamedTuple):
    """What the model says of a prompt token, given the tokens before it."""

    logprob: float
    rank: int  # 1: the likeliest token, which greedy decoding takes
    top: tuple[tuple[int, float], ...]  # the likeliest ones and their log-probabilities, best first


class Variant(Protocol):
    """What is added to the model for one request; ``adapters/store.py`` implements it.

    Attributes:
        name: by which requests ask for it.
        key: a hash of what is added, 16 bytes.
        number: of this version, from 1 on.
    """

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def number(self) -> int: ...


def root_of(salt: bytes, variant: Variant | None) -> bytes:
    """The :attr:`Request.root` of requests with this salt and variant."""
    return salt if variant is None else b"\xff" + variant.key + salt


@dataclass(slots=True, eq=False)
class Request:
    """One sequence that the engine generates.

    ``tokens`` holds the prompt and the generated tokens. ``num_computed`` positions have their K/V
    in the pool, or will once the steps under way are done. The scheduler still has to compute the
    tokens after them: one for a decode, more for a prompt or a preempted request.
    """

    id: int  # a later request has a larger one
    tokens: list[int]
    params: SamplingParams
    seed: int  # of its random stream
    priority: int = 0  # under `Policy.PRIORITY`, lower numbers come first
    salt: bytes = b""  # of the caller; only requests with equal salts share K/V
    # Under `Policy.FAIR`, its client and parts of the client, which take turns within their whole.
    share: tuple[str, ...] = ()
    # It runs when nothing else waits, and gives way first.
    is_background: bool = False
    prompt: Prompt | None = None  # the prompt, if it is more than tokens
    variant: Variant | None = None  # what is added to the model for it
    keep_blocks: bool = False  # its blocks stay after it ended, for later forks
    num_prompt: int = 0
    num_computed: int = 0
    num_in_flight: int = 0  # tokens that steps under way choose; they are not in `tokens` yet
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    prefix_miss: str | None = None  # why no more were found; None if all reusable ones were found
    # Numbers of leading tokens. A later prompt may begin with these tokens and then differ, because
    # a turn of a chat ends there.
    turn_ends: Sequence[int] = ()
    # Numbers of leading tokens, and for how many seconds their K/V is worth more.
    marks: Sequence[tuple[int, float]] = ()
    num_preempted: int = 0
    # max(0, steps in which prompts overtook it - steps in which none did)
    num_overtaken: int = 0
    num_charged: int = 0  # tokens computed of it that count for its client
    num_faults: int = 0  # failed steps that computed it
    reported: dict[str, Any] = field(default_factory=dict)  # by features: fields of its completion
    # Other samples of the same prompt; they fork when the prompt is computed.
    samples: list["Request"] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    # Of each prompt token, as far as known; None: not wanted.
    prompt_logprobs: list[PromptLogprob | None] | None = None
    known_keys: list[int] = field(default_factory=list)  # `keys` as of the last call, if `prompt`
    constraint: Constraint | None = None  # that its generated tokens follow
    pinned: Pinned | None = None  # what came of the wish to keep its K/V, if it has ended
    finish_reason: FinishReason | None = None
    error: BaseException | None = None  # that ends it
    arrival_time: float = field(default_factory=time.perf_counter)
    admitted_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.tokens)

    @property
    def root(self) -> bytes:
        """What all its K/V depends on: requests share K/V if it is equal. No salt is text that
        begins with the byte 255."""
        return root_of(self.salt, self.variant)

    @property
    def keys(self) -> list[int]:
        """What its K/V depends on: the keys of its prompt, then the other tokens."""
        if self.prompt is None:
            return self.tokens
        self.known_keys = self.known_keys or list(self.prompt.keys)
        self.known_keys += self.tokens[len(self.known_keys) :]
        return self.known_keys

    def prompt_of(self, tokens: list[int]) -> Prompt:
        """A prompt that begins as this request's, with these tokens."""
        return Prompt(tokens) if self.prompt is None else self.prompt.with_tokens(tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def scored(self, start: int, stop: int) -> range:
        """The positions of ``[start, stop)`` whose logits score the prompt token that follows."""
        if self.prompt_logprobs is None:
            return range(0)
        first = max(1, self.params.prompt_logprobs_from) - 1
        return range(max(start, first), min(stop, self.num_prompt - 1))

    @property
    def reusable(self) -> list[int]:
        """The tokens before the first prompt token whose log-probability is still to be computed:
        all but the last of them may take their K/V from the prefix cache."""
        known = self.prompt_logprobs or ()
        lacking = (p + 1 for p in self.scored(0, self.num_prompt) if known[p + 1] is None)
        first = next(lacking, None)
        return self.keys if first is None else self.keys[:first]

    @property
    def may_forbid_all(self) -> bool:
        """Whether its options may forbid every token."""
        params = self.params
        forbids = -math.inf in dict(params.logit_bias).values() or self.constraint is not None
        return forbids or bool(params.logits_processors)

    @property
    def num_pending(self) -> int:
        """Tokens whose K/V is not in the pool yet."""
        return self.num_tokens - self.num_computed

    @property
    def is_exhausted(self) -> bool:
        """Whether the request needs no further token after the tokens in flight."""
        return self.num_generated >= self.params.max_tokens or self.error is not None

    @property
    def max_kv_tokens(self) -> int:
        """Largest number of K/V slots it can need: the last generated token needs none."""
        return self.num_prompt + self.params.max_tokens - 1
