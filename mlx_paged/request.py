"""One sequence on its way through the engine. Knows no mlx."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_paged.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # taken back by the caller


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine.

    ``tokens`` holds the prompt and everything generated since; ``num_computed`` of them have their
    K/V in the pool. Whatever lies between the two is what the scheduler still has to compute: one
    token for a decode, more for a prompt or for a request that was preempted.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    num_prompt: int = field(init=False)
    priority: int = 0  # lower numbers first, under that policy
    num_computed: int = 0
    num_in_flight: int = 0  # 1 while a step under way chooses the next token
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preempted: int = 0
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens and the one that a step under way is choosing."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens whose K/V is not in the pool yet."""
        return self.num_tokens - self.num_computed

    @property
    def max_kv_tokens(self) -> int:
        """K/V slots this request can come to need: the last generated token never needs one."""
        return self.num_prompt + self.params.max_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
