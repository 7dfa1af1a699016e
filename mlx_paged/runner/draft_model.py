"""A smaller model that guesses the next tokens of an engine's requests."""

import logging
import time
from dataclasses import dataclass

import mlx.nn as nn

from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.request import Request
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_probe import Batching, ModelProfile
from mlx_paged.runner.pooled_model import MeasuredModel, PooledModel, probed
from mlx_paged.scheduler.progress import Planning, Progress
from mlx_paged.scheduler.step import DeviceError, Span

LOGGER = logging.getLogger(__name__)

FIRST_GUESS = 0.6  # share of right drafts before the first one
RATE = 0.1  # rate at which this share follows the latest drafts
RETURN_RATE = 0.002  # rate at which it returns to FIRST_GUESS, so that a request is tried again
CATCH_UP = 256  # tokens that the model reads in a step at most before it drafts


@dataclass(eq=False)
class _Drafted:
    """A sequence of the draft model, in the model's own pool: the tokens of a request, then drafts.

    Attributes:
        sequence: has the request's list of tokens, and a progress of its own.
        num_known: tokens that the request had before the latest drafts.
        num_right: of these drafts, as far as known.
        share: of its drafts that were right lately.
    """

    sequence: Request
    num_known: int
    num_right: int = 0
    share: float = FIRST_GUESS

    @property
    def num_computed(self) -> int:
        """Positions whose K/V is there and right."""
        return min(self.sequence.num_computed, self.num_known + self.num_right)


class DraftModel:
    """Drafts of a small model for all requests in one batch (Leviathan et al. 2023,
    arXiv:2211.17192). It draws with the numbers that the requests draw with, so that two models
    that agree choose the same tokens.

    Its K/V lies in a pool of its own, because two models cannot share it. Prompts with a common
    prefix share their blocks there, too.

    Args:
        pooled: an mlx-lm model with the vocabulary of the requests, and its pool.
        num_tokens: drafts of a request in a step at most.
    """

    def __init__(self, pooled: PooledModel, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.pooled = pooled
        self.seconds = self.seconds_per_draft = 0.0
        self._trace_seconds = 0.0  # the part of `seconds` that traced graphs
        self._rewinds = not pooled.profile.states.exist
        self._embedding_rows = pooled.profile.embedding_rows
        self._allocator = pooled.allocator
        self._runner = pooled.runner
        self._progress = Progress(pooled.allocator)
        self._drafted: dict[int, _Drafted] = {}  # by request id
        self._has_failed = False

    @classmethod
    def beside(
        cls, target: PooledModel, model: nn.Module, profile: ModelProfile, num_tokens: int
    ) -> "DraftModel":
        """A drafter whose pool has room for as many tokens as the target's."""
        room = target.pool.num_blocks // target.plan.width
        config = target.config.of_pool(
            num_blocks=room,
            prefill_chunk=CATCH_UP,
            kv_bits=None,
            kv_disk=None,
            adapters=None,
        )
        if profile.states.exist:  # of its drafts' states none is worth a snapshot
            config = config.of_pool(prefix_cache=False)
        return cls(PooledModel(MeasuredModel.of(model, profile, config)), num_tokens)

    def likelihood(self, request: Request) -> float:
        if self._has_failed:
            return 0.0
        known = self._drafted.get(request.id)
        if known is None:
            return FIRST_GUESS
        known.share += RETURN_RATE * (FIRST_GUESS - known.share)
        return known.share

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        started, self._trace_seconds = time.perf_counter(), 0.0
        drafts: dict[int, list[int]] = {}
        try:
            by_id = {r.id: depth for r, depth in zip(requests, depths, strict=True)}
            drafts = self._drafts(by_id, requests)
        except DeviceError as error:  # of any model: the engine recovers from it
            LOGGER.warning("no drafts of this step: %s", error)
            self._give_up_sequences()
        except Exception as error:
            LOGGER.warning("the draft model failed, and no more drafts are made: %s", error)
            self._has_failed = True
            self._give_up_sequences()
        self.seconds = time.perf_counter() - started
        per_draft = (self.seconds - self._trace_seconds) / max(depths)
        before = self.seconds_per_draft or per_draft
        self.seconds_per_draft = before + RATE * (min(per_draft, 4 * before) - before)
        return [drafts.get(request.id, []) for request in requests]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        known = self._drafted.get(request.id)
        if known is None:  # a later step failed
            return
        known.num_right = accepted
        for is_right in [1] * accepted + [0] * (accepted < drafted):
            known.share += RATE * (is_right - known.share)

    def drop(self, request: Request) -> None:
        self._forget(request)
        if not self._drafted:
            self._runner.release(self._allocator.take_released())

    def _forget(self, request: Request) -> None:
        known = self._drafted.pop(request.id, None)
        if known is not None and request.id in self._allocator:
            own, count = known.sequence, known.num_computed
            self._allocator.truncate(own.id, count)
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
            LOGGER.warning("the draft model's pool is made anew: %s", error)
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
        planning, room = Planning(), CATCH_UP
        for request in requests:
            room -= self._read(planning, request, room)
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
        self._allocator.register_prefix(own.id, own.tokens, start)
        self._allocator.trim(own.id, start, offers=True)
        return self._add(planning, own, min(len(own.tokens), start + room)) - start

    def _admit(self, planning: Planning, request: Request) -> _Drafted | None:
        if max(request.tokens) >= self._embedding_rows:  # of a prompt: others have no such ids
            return None
        own = Request(
            request.id,
            request.tokens,
            request.params,
            request.seed,
            salt=request.salt,
            num_prompt=request.num_prompt,
        )
        for _ in range(1 + len(self._drafted)):
            try:
                found = self._progress.admit(own, own.tokens if self._rewinds else None)
            except OutOfBlocksError:
                self._evict(planning)
                continue
            planning.copies += found.copies
            known = self._drafted[request.id] = _Drafted(own, len(own.tokens))
            return known
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


def can_draft(profile: ModelProfile) -> bool:
    """Whether drafts of a model's requests can be computed."""
    return profile.batching is not Batching.SINGLE


def probed_draft(profile: ModelProfile, draft_model: nn.Module) -> ModelProfile:
    """What a draft model for the model of `profile` stores.

    Raises:
        ValueError: it has another vocabulary, or it computes one sequence at a time.
    """
    own = probed(draft_model)
    if own.logit_columns != profile.logit_columns or own.embedding_rows < own.logit_columns:
        sizes = {own.logit_columns, own.embedding_rows} - {profile.logit_columns}
        raise ValueError(
            f"[Engine] draft_model has a vocabulary of {min(sizes)} tokens: expected "
            f"{profile.logit_columns}, as many as the model has"
        )
    if not can_draft(own):
        raise ValueError(
            "[Engine] draft_model computes one sequence at a time: expected a model that computes "
            "several together"
        )
    return own
