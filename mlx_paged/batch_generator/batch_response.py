"""What a BatchGenerator says of a token: mlx-lm's response, whose caches cost nothing unread."""

from collections import deque
from collections.abc import Callable
from typing import Any

from mlx_lm.generate import GenerationBatch

Caches = list[Any]
"""mlx-lm's caches, one a layer."""


class Lease:
    """The blocks of an ended sequence, held until nobody can ask for its caches any more.

    Args:
        request_id: of the sequence, which the engine keeps.
        make: makes its caches.
        returned: where the id goes when this is dropped, in whatever thread that happens.
    """

    def __init__(self, request_id: int, make: Callable[[], Caches], returned: deque[int]) -> None:
        self._request_id = request_id
        self._make = make
        self._returned = returned

    def __call__(self) -> Caches:
        return self._make()

    def __del__(self) -> None:
        self._returned.append(self._request_id)


class Response(GenerationBatch.Response):
    """mlx-lm's response: one more token of one sequence.

    Attributes:
        uid, token: whose token, and its id.
        logprobs: ``[vocab]``, log-probabilities of which the token was chosen.
        finish_reason: "stop", "length", or "error" where a processor or sampler raised or the
            model failed; `token` and `logprobs` then mean nothing. None while the sequence goes on.
        all_tokens: of a sequence that ended: everything from its first token.
        prompt_cache: of a sequence that ended: mlx-lm's caches of `all_tokens`. They are made when
            they are first asked for, in the thread of the generator, and cost a copy then.
        error: what went wrong.
    """

    error: str | None = None
    _prompt_cache: Caches | Lease | None

    @property
    def prompt_cache(self) -> Caches | None:
        if isinstance(self._prompt_cache, Lease):
            self._prompt_cache = self._prompt_cache()
        return self._prompt_cache

    @prompt_cache.setter
    def prompt_cache(self, cache: "Caches | Lease | None") -> None:
        self._prompt_cache = cache

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"
