"""A head that guesses the next tokens of an engine's requests from the model's hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.nn as nn

from mlx_paged.heads.head import Head
from mlx_paged.request import Request
from mlx_paged.runner.head_model import Given, HeadModel
from mlx_paged.runner.hidden_states import HiddenStates
from mlx_paged.runner.kept_states import Piece, gathered
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_probe import Batching, ModelProfile
from mlx_paged.runner.pooled_drafter import Drafted, PooledDrafter, pooled_beside
from mlx_paged.runner.pooled_model import PooledModel, probed
from mlx_paged.scheduler.acceptance import Acceptance
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span


@dataclass(eq=False)
class _Drafted(Drafted):
    """A sequence of the head, whose tokens are `text`, those of its request behind position
    `origin`."""

    origin: int = 0
    text: list[int] = field(default_factory=list)


class HeadDrafter(PooledDrafter):
    """Drafts of a head (EAGLE-3: Li et al. 2025, arXiv:2503.01840).

    An entry of the head at position p is made of the model's states of position p - 1 and of the
    token at position p. A sequence of the head is its request's tokens behind `origin`, the first
    position whose states are kept: its token i and its entry i are those of position
    `origin` + 1 + i. With origin 0 the entries up to a position depend only on the tokens up to it,
    and prompts with a common prefix share their blocks. A request whose prompt was found in the
    prefix cache takes the head's K/V from the head's own cache; if that has less of the prompt, the
    head's attention begins where the model's computation began. The model computes nothing again.

    Args:
        pooled: a :class:`HeadModel` on its pool.
        num_tokens: drafts of a request in a step at most.
        shares: whether prompts share prefixes.
    """

    def __init__(self, pooled: PooledModel, num_tokens: int, head: HeadModel, shares: bool) -> None:
        super().__init__(pooled, num_tokens)
        self._head = head
        self._is_sharing = shares
        self._kept = head.kept
        self._acceptance = Acceptance(num_tokens)

    @classmethod
    def beside(
        cls, target: PooledModel, model: HeadModel, profile: ModelProfile, num_tokens: int
    ) -> "HeadDrafter":
        """A drafter whose pool has room for as many tokens as the target's."""
        pooled = pooled_beside(target, model, profile, compile=False)
        return cls(pooled, num_tokens, model, target.config.prefix_cache)

    def settled(self, launched: LaunchedStep) -> None:
        """Keep the hidden states of a step that has been read. Engines call this for each step."""
        right = {request.id: accepted for request, _, accepted in launched.report.verified}
        for states in launched.hidden:
            self._kept.add(states, right)
        launched.hidden.clear()

    def likelihood(self, request: Request) -> tuple[float, ...]:
        return () if self._has_failed else self._acceptance.likelihood(request.id)

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        self._acceptance.add(request.id, drafted, accepted)

    def rested(self) -> None:
        self._acceptance.rested()
        super().rested()

    def drop(self, request: Request) -> None:
        self._acceptance.drop(request.id)
        super().drop(request)

    def _give_up_sequences(self) -> None:
        self._kept.clear()
        super()._give_up_sequences()

    def _drafts(self, depths: dict[int, int], requests: list[Request]) -> dict[int, list[int]]:
        try:
            return super()._drafts(depths, requests)
        finally:
            self._head.forget()

    def _read(self, planning: Planning, request: Request, room: int) -> int:
        known = self._drafted.get(request.id)
        if known is not None:
            own, origin = known.sequence, _headed(known).origin
            text = _headed(known).text
            text += request.tokens[origin + 1 + len(text) :]
            start = origin + min(known.num_computed, len(own.tokens) - 1)
            first, _ = self._kept.pieces(request.id, start, len(request.tokens) - 1)
            if first > start:
                self._forget(request)
        return super()._read(planning, request, room)

    def _admit(self, planning: Planning, request: Request) -> Drafted | None:
        stop = len(request.tokens) - 1  # the newest token has no states yet
        first, _ = self._kept.pieces(request.id, 0, stop)
        shares = self._is_sharing and request.prompt is None and request.num_prompt > 1
        salt = request.salt + str(request.tokens[0]).encode()  # no entry has the first token
        if first and shares:
            shares = self._allocator.cached_prefix(request.tokens[1:stop], salt) >= first
        origin = 0 if shares else first
        # A request says with a number of prompt tokens that is not 0 which numbers it draws with.
        origin += origin + 1 == request.num_prompt
        if first == stop or origin == stop:
            return None
        text = request.tokens[origin + 1 :]
        own = Request(
            request.id,
            text,
            request.params,
            request.seed,
            salt=salt,
            num_prompt=request.num_prompt - origin - 1,
        )
        drafted = _Drafted(own, len(own.tokens), is_shared=shares, origin=origin, text=text)
        return self._entered(planning, drafted, own.tokens if shares else None)

    def _launch(self, planning: Planning, before: LaunchedStep | None) -> LaunchedStep:
        head = self._head
        head.given = self._fused(planning.spans) if before is None else head.take_left()
        return super()._launch(planning, before)

    def _fused(self, spans: Sequence[Span]) -> Given:
        """What entries take of the model's states."""
        pieces = list[Piece]()
        for span in spans:
            start = _headed(self._drafted[span.request.id]).origin + span.start
            first, found = self._kept.pieces(span.request.id, start, start + len(span))
            assert first == start, "the states of a span are kept"
            pieces += found
        rows = [array[:, None] for array in gathered(pieces)]
        fused = self._head.head.fuse(rows).flatten(0, 1)
        return Given(fused, {span.request.id: len(span) for span in spans})


def _headed(drafted: Drafted) -> _Drafted:
    assert isinstance(drafted, _Drafted)
    return drafted


def head_model(head: Head, model: nn.Module, columns: int) -> HeadModel:
    """A head that is bound to `model`, whose logits have so many columns, as a runner's model."""
    forms = HiddenStates(model, head.states).forms(model)
    return HeadModel(head, forms, columns)


def probed_head(head: HeadModel) -> ModelProfile:
    """What a head stores.

    Raises:
        ValueError: it computes one sequence at a time, or keeps recurrent states.
    """
    own = probed(head)
    if own.batching is Batching.SINGLE or own.states.exist:
        raise ValueError(
            "[Engine] draft_head computes one sequence at a time: expected a head that computes "
            "several together"
        )
    return own
