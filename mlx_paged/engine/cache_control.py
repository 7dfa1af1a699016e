"""What callers say of the K/V that an engine keeps for later prompts. Knows no mlx."""

import math
from collections.abc import Callable
from typing import Any

from mlx_paged.arguments import require, require_text
from mlx_paged.engine.one_thread import Occupancy, exclusive
from mlx_paged.engine.text import PromptEncoder, PromptLike
from mlx_paged.kv.pins import Pinned
from mlx_paged.sampling_params import WEEK, is_within
from mlx_paged.scheduler.scheduler import Scheduler


class CacheControl:
    """Pins and forgets K/V of ended requests: a part of :class:`EngineCore`."""

    scheduler: Scheduler
    occupancy: Occupancy
    clock: Callable[[], float]
    _encode: PromptEncoder
    _release_states: Callable[[], None]

    @exclusive
    def pin(
        self, prompt: PromptLike, *, seconds: float | None = None, cache_salt: str = ""
    ) -> Pinned:
        """Keep the known K/V of a prompt: it is evicted after all other K/V, from the prompt's
        beginning on, as far as the share of its owner in the pool allows. The owner is the salt. A
        request that needs the blocks gets them nevertheless.

        Args:
            seconds: how long, at most a week; None: until it is forgotten. 0 ends a pin.

        Raises:
            ValueError: a prompt as for :meth:`add_request`, or `seconds` out of range.
        """
        is_valid = seconds is None or is_within(seconds, 0, WEEK)
        require(is_valid, "pin", "seconds", seconds, f"None, or from 0 to {WEEK}")
        require_text("pin", "cache_salt", cache_salt)
        until = math.inf if seconds is None else self.clock() + float(seconds)
        return self.scheduler.pin(self._keys(prompt), cache_salt.encode(), until)

    @exclusive
    def forget(self, prefix: PromptLike | None = None, *, cache_salt: str = "") -> int:
        """Forget the K/V of ended requests: of a prompt from its end on, up to where another known
        prompt goes on differently; None: all with this salt. What requests use now stays, and so
        does what is on a disk. Returns the number of tokens, of all layer groups for a salt."""
        require_text("forget", "cache_salt", cache_salt)
        keys = None if prefix is None else self._keys(prefix)
        num_tokens = self.scheduler.forget(keys, cache_salt.encode())
        self._release_states()
        return num_tokens

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Forget the K/V of ended requests, and leave `kv_disk`: the weights may be others now."""
        self.scheduler.forget_cached()
        self._release_states()

    def _keys(self, prompt: PromptLike) -> list[Any]:
        return list(self._encode(prompt).keys)
