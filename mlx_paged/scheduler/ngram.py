"""Drafts that repeat what a request's tokens said before. Knows no mlx."""

from array import array

import numpy as np

from mlx_paged.options import MAX_DRAFTS
from mlx_paged.request import Request
from mlx_paged.scheduler.pace import Pace

NGRAM = 3  # tokens whose latest earlier occurrence a draft follows; also the longest edit
LONG_RUN = 4  # right guesses in a row after which a source counts as found

FORGETTING = 0.97
"""Weight of a request's guess relative to its next guess. The guesses of all requests together are
forgotten ten times as slowly."""

PRIOR = 4.0  # weight of all requests' guesses beside a request's own, in guesses

FACTORS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


class NgramDrafter:
    """Prompt lookup (Saxena 2023; Yang et al. 2023, arXiv:2304.04487): a token that followed the
    last tokens once may follow them again. A guess costs no model, so that each token also shows
    what a guess would have been worth, whether it was computed as a draft or not."""

    num_tokens, chunk = MAX_DRAFTS, 0
    takes_time, seconds, pace = False, 0.0, Pace()  # a look-up takes none beside a step

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}  # by request id
        self._overall = Shares(1.0, 2.0)

    def likelihood(self, request: Request) -> tuple[float, ...]:
        """The share of right guesses lately."""
        source = self._sources.get(request.id)
        if source is None:
            source = self._sources[request.id] = _Source(request, self._overall)
        source.update(request.tokens)
        return (source.share,) if source.guess_at else ()

    def num_unread(self, request: Request) -> int:
        return 0

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        pairs = zip(requests, depths, strict=True)
        return [self._sources[r.id].guesses(r.tokens, depth) for r, depth in pairs]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Nothing to learn: `likelihood` compares each token with its guess."""

    def rested(self) -> None:
        """Nothing is out of date: `likelihood` compares guesses that nobody wanted, too."""

    def drop(self, request: Request) -> None:
        self._sources.pop(request.id, None)

    def recover(self) -> None:
        """Nothing to forget: tokens are never wrong."""


class Shares:
    """Numbers of guesses and of right ones, by kind: in a short run, in a long run, behind an edit.
    Old guesses count less."""

    def __init__(self, right: float, guesses: float) -> None:
        self.right, self.guesses = [right] * 3, [guesses] * 3

    def add(self, is_right: bool, kind: int, kept: float) -> None:
        self.right[kind] = kept * self.right[kind] + is_right
        self.guesses[kind] = kept * self.guesses[kind] + 1


class _Source:
    """Where one request's next tokens may be copied from.

    Attributes:
        guess_at: index of the token that is the next guess; 0: there is none.
        run: how many guesses in a row were right; below 0: how many were wrong since a long run.
    """

    def __init__(self, request: Request, overall: Shares) -> None:
        tokens = request.tokens
        self.guess_at = self.run = 0
        self._own, self._overall = Shares(0.0, 0.0), overall
        size = 1 << (2 * (request.num_prompt + request.params.max_tokens)).bit_length()
        self._mask = min(size, 2**20) - 1
        # By the hash of N tokens, the index of the token after their latest occurrence.
        after = np.zeros(self._mask + 1, np.int32)
        self._known = max(len(tokens) - 1, 0)
        parts = [np.array(tokens[i : self._known - NGRAM + 1 + i], np.int64) for i in range(NGRAM)]
        hashes = sum(part * factor for part, factor in zip(parts, FACTORS, strict=True))
        after[hashes & self._mask] = np.arange(NGRAM, NGRAM + len(parts[0]))
        self._after = array("i", after.tobytes())

    @property
    def share(self) -> float:
        """The part of guesses of the present kind that are right: of the request's own and, with
        weight `PRIOR`, of all requests'."""
        kind, own, overall = self._kind, self._own, self._overall
        prior = PRIOR * overall.right[kind] / overall.guesses[kind]
        return (own.right[kind] + prior) / (own.guesses[kind] + PRIOR)

    @property
    def _kind(self) -> int:
        return 2 if self.run < 0 else int(self.run >= LONG_RUN)

    def update(self, tokens: list[int]) -> None:
        """Compare the new tokens with their guesses and look for a source of the next one."""
        for stop in range(self._known + 1, len(tokens) + 1):
            if self.guess_at:
                hit = tokens[self.guess_at] == tokens[stop - 1]
                self._own.add(hit, self._kind, FORGETTING)
                self._overall.add(hit, self._kind, 1 - (1 - FORGETTING) / 10)
                self._follow(tokens, stop, hit)
            if stop < NGRAM:
                continue
            a, b, c = tokens[stop - NGRAM : stop]
            slot = (a * FACTORS[0] + b * FACTORS[1] + c * FACTORS[2]) & self._mask
            found = self._after[slot] if self.run <= 0 else 0
            if found not in (0, self.guess_at) and tokens[found - NGRAM : found] == [a, b, c]:
                self.guess_at, self.run = found, 0
            self._after[slot] = stop
        self._known = len(tokens)

    def _follow(self, tokens: list[int], stop: int, hit: bool) -> None:
        """Move on by a token. Behind an edit a source that was found goes on after the same token
        as the request if that is near, else after the one that was guessed."""
        if hit:
            self.run = LONG_RUN if self.run < 0 else self.run + 1
        elif self.run >= LONG_RUN or -NGRAM < self.run < 0:
            self.run = min(self.run, 0) - 1
            first = max(self.guess_at - NGRAM, 0)
            near = tokens[first : min(self.guess_at + NGRAM + 1, stop - 1)]
            if tokens[stop - 1] in near:
                self.guess_at = first + near.index(tokens[stop - 1])
        else:
            self.guess_at, self.run = -1, 0
        self.guess_at += 1

    def guesses(self, tokens: list[int], depth: int) -> list[int]:
        """The next tokens; a source that reaches the end goes on with the guesses themselves."""
        period = len(tokens) - self.guess_at
        return [tokens[self.guess_at + i % period] for i in range(depth)]
