"""What guesses the next tokens of an engine's requests by steps on a model of its own."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.request import Request
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_probe import ModelProfile
from mlx_paged.runner.pooled_model import MeasuredModel, PooledModel
from mlx_paged.scheduler.pace import Pace, PaceMeter
from mlx_paged.scheduler.progress import Planning, Progress
from mlx_paged.scheduler.step import DeviceError, Span

LOGGER = logging.getLogger(__name__)

CHUNK = 256  # tokens that the model reads in a step at most before it drafts


@dataclass(eq=False)
class Drafted:
    """A sequence of the draft model, in the model's own pool: the tokens of a request, then drafts.

    Attributes:
        sequence: has the request's list of tokens, and a progress of its own.
        num_known: tokens that the request had before the latest drafts.
        num_right: of these drafts, as far as known.
        is_shared: whether others may share its blocks.
    """

    sequence: Request
    num_known: int
    num_right: int = 0
    is_shared: bool = True

    @property
    def num_computed(self) -> int:
        """Positions whose K/V is there and right."""
        return min(self.sequence.num_computed, self.num_known + self.num_right)


def pooled_beside(
    target: PooledModel, model: nn.Module, profile: ModelProfile, **options: Any
) -> PooledModel:
    """A model on a pool with room for as many tokens as the target's."""
    room = target.pool.num_blocks // target.plan.width
    config = target.config.of_another_model(
        num_blocks=room, prefill_chunk=CHUNK, kv_bits=None, **options
    )
    if profile.states.exist:  # of its drafts' states none is worth a snapshot
        config = config.of_pool(prefix_cache=False)
    return PooledModel(MeasuredModel.of(model, profile, config))


class PooledDrafter:
    """Drafts of a model on a pool of its own for all requests in one batch. It draws with the
    numbers that the requests draw with, so that two models that agree choose the same tokens.

    Args:
        pooled: the model and its pool.
        num_tokens: drafts of a request in a step at most.
    """

    chunk, takes_time = CHUNK, True

    def __init__(self, pooled: PooledModel, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.pooled = pooled
        self.seconds = 0.0
        self._meter = PaceMeter()
        self._trace_seconds = 0.0  # the part of `seconds` that traced graphs
        self._num_read = self._num_passes = 0  # tokens, and passes, of the latest proposals
        self._rewinds = not pooled.profile.states.exist
        self._allocator = pooled.allocator
        self._runner = pooled.runner
        self._progress = Progress(pooled.allocator)
        self._drafted: dict[int, Drafted] = {}  # by request id
        self._has_failed = False

    @property
    def pace(self) -> Pace:
        return self._meter.pace

    def num_unread(self, request: Request) -> int:
        return 0 if request.id in self._drafted else len(request.tokens) - request.num_cached

    def rested(self) -> None:
        self._meter.rested()

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        started, self._trace_seconds = time.perf_counter(), 0.0
        self._num_read = self._num_passes = 0
        drafts: dict[int, list[int]] = {}
        try:
            by_id = {r.id: depth for r, depth in zip(requests, depths, strict=True)}
            drafts = self._drafts(by_id, requests)
        except DeviceError as error:  # of any model: the engine recovers from it
            LOGGER.warning("no drafts of this step: %s", error)
            self._give_up_sequences()
        except Exception as error:
            LOGGER.warning("what drafts failed, and no more drafts are made: %s", error)
            self._has_failed = True
            self._give_up_sequences()
        self.seconds = time.perf_counter() - started
        guesses = sum(map(len, drafts.values()))
        tokens = max(0, self._num_read - len(drafts))  # each first guess has a token of its own
        own_seconds = self.seconds - self._trace_seconds
        self._meter.observe(self._num_passes, guesses, tokens, own_seconds)
        return [drafts.get(request.id, []) for request in requests]

    def drop(self, request: Request) -> None:
        self._forget(request)
        if not self._drafted:
            self._runner.release(self._allocator.take_released())

    def _forget(self, request: Request) -> None:
        known = self._drafted.pop(request.id, None)
        if known is not None and request.id in self._allocator:
            own, count = known.sequence, known.num_computed
            self._allocator.truncate(own.id, count)
            if known.is_shared:
                self._allocator.register_tail(own.id, own.tokens, min(count, len(own.tokens)))
            self._allocator.free(own.id)

    def recover(self) -> None:
        self._give_up_sequences()
        self._runner.recover()

    def resize(self, room: int) -> None:
        """Let the pool have room for so many blocks of all layers, while no step is under way. All
        sequences are read again."""
        self._give_up_sequences()
        self._runner.release(self._allocator.take_released())
        num_blocks, kept = room * self.pooled.plan.width, None
        if num_blocks < self._allocator.num_blocks:
            kept = self._allocator.compact(num_blocks)
        else:
            self._allocator.grow(num_blocks)
        try:
            self._runner.resize(num_blocks, kept)
        except Exception as error:
            LOGGER.warning("the pool of what drafts is made anew: %s", error)
            self._runner.renew(num_blocks)

    def _give_up_sequences(self) -> None:
        """Keep no sequence of a step that failed: what is planned of the sequences was perhaps not
        computed."""
        for request_id in self._drafted:
            self._allocator.free(request_id)
        self._drafted.clear()
        self._allocator.forget_prefixes()

    def _drafts(self, depths: dict[int, int], requests: list[Request]) -> dict[int, list[int]]:
        """Drafts of at most these depths by request id, one step of the model for each."""
        planning, room = Planning(), CHUNK
        for request in requests:
            room -= self._read(planning, request, room)
        self._num_read = CHUNK - room
        launched: list[LaunchedStep] = []
        for depth in range(1, 1 + max(depths.values())):
            if not planning.spans:
                break
            launched.append(self._launch(planning, launched[-1] if launched else None))
            drafting = [span.request for span in planning.spans if span.samples]
            planning = Planning()
            for own in drafting:
                if depths[own.id] > depth:
                    self._add(planning, own, own.num_computed + 1)
        self._num_passes = len(launched)
        drafts: dict[int, list[int]] = {}
        for each in launched:
            for choice in self._runner.collect(each):
                drafts.setdefault(choice.request.id, []).append(choice.token)
        for known in [self._drafted[r.id] for r in requests if r.id in self._drafted]:
            known.num_known, known.num_right = len(known.sequence.tokens), 0
        return drafts

    def _read(self, planning: Planning, request: Request, room: int) -> int:
        """Add a span of the request's tokens that the model has not read; how many these are."""
        known = self._drafted.get(request.id) or self._admit(planning, request)
        if known is None or room <= 0:
            return 0
        own, start = known.sequence, known.num_computed
        if start >= len(own.tokens) and not self._rewinds:
            return 0  # there are no states before the newest token
        # Drafts that no step computed are not verified. The newest token chooses the next one.
        start = min(start, len(own.tokens) - 1)
        self._progress.correct(own, start)
        if known.is_shared:
            self._allocator.register_prefix(own.id, own.tokens, start)
        self._allocator.trim(own.id, start, offers=known.is_shared)
        return self._add(planning, own, min(len(own.tokens), start + room)) - start

    def _admit(self, planning: Planning, request: Request) -> Drafted | None:
        """Begin a sequence for a request; None: it gets no drafts now."""
        raise NotImplementedError

    def _entered(
        self, planning: Planning, drafted: Drafted, shared: Sequence[int] | None
    ) -> Drafted | None:
        """The sequence on its blocks, which it shares with those that begin as `shared`; None:
        there are none for it. Those of a model with recurrent layers are not shared."""
        own = drafted.sequence
        for _ in range(1 + len(self._drafted)):
            try:
                found = self._progress.admit(own, shared if self._rewinds else None)
            except OutOfBlocksError:
                self._evict(planning)
                continue
            planning.copies += found.copies
            self._drafted[own.id] = drafted
            return drafted
        return None

    def _evict(self, planning: Planning) -> None:
        """Free the blocks of the oldest request that this step does not compute."""
        for request_id, known in self._drafted.items():
            if request_id not in planning.requests:
                self._forget(known.sequence)
                return

    def _add(self, planning: Planning, own: Request, stop: int) -> int:
        """Compute the sequence's positions up to `stop`, if there are blocks; where it is then."""
        start = own.num_computed
        try:
            planning.copies += self._allocator.make_writable(own.id, start, stop)
        except OutOfBlocksError:
            return start
        known = len(own.tokens)
        move = self._allocator.advance(own.id, start, stop, is_sure=start < known)
        planning.add(Span.of(own, start, stop, stop >= known, move))
        return stop

    def _launch(self, planning: Planning, before: LaunchedStep | None) -> LaunchedStep:
        step = planning.step(released=self._allocator.take_released())
        self._progress.plan(step)
        launched = self._runner.launch(step, before)
        self._allocator.store.copies_done()
        self._trace_seconds += launched.report.extra_seconds
        return launched
