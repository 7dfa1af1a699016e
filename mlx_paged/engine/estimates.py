"""Says what a request would cost if it were added now. Knows no mlx."""

from collections.abc import Sequence
from typing import NamedTuple

from mlx_paged.engine.core import EngineCore
from mlx_paged.prompt import Prompt
from mlx_paged.request import Variant, root_of


class Estimate(NamedTuple):
    """What a request would cost.

    Attributes:
        tokens: of its prompt.
        cached_tokens: those of them whose K/V the pool has.
        tokens_ahead: prompt tokens of other requests that are not computed yet.
        first_token_s: seconds until its first token at the rate of prompt tokens so far; None
            before the first prompt was computed.
    """

    tokens: int
    cached_tokens: int
    tokens_ahead: int
    first_token_s: float | None


def estimate(
    engine: EngineCore, tokens: Sequence[int], cache_salt: str, variant: Variant | None = None
) -> Estimate:
    """What a request with a prompt of these token ids would cost. Computes and queues nothing.
    Raises ValueError, as :meth:`EngineCore.add_request`, for a token that the model does not have.
    """
    engine.check_prompt(tokens)
    keys = tokens.keys if isinstance(tokens, Prompt) else tokens
    cached, ahead = engine.scheduler.ahead_of(keys, root_of(cache_salt.encode(), variant))
    stats, seconds = engine.stats, None
    if stats.prompt_tokens and stats.prefill_seconds:
        left = ahead + len(keys) - cached
        seconds = left * stats.prefill_seconds / stats.prompt_tokens
    return Estimate(len(keys), cached, ahead, seconds)
