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
from mlx_paged.scheduler.step import DeviceError, Span, Step

LOGGER = logging.getLogger(__name__)

FIRST_GUESS = 0.6  # share of right drafts before the first one
RATE = 0.1  # rate at which this share follows the latest drafts
RETURN_RATE = 0.002  # rate at which it returns to FIRST_GUESS, so that a request is tried again
CATCH_UP = 256  # tokens that the model reads in a step at most before it drafts


@dataclass(eq=False)
class _Shadow:
    """A request as the draft model sees it: its known tokens, computed in the model's own pool.

    Attributes:
        computed: positions whose K/V is there, and after which its recurrent states are, those of
            drafts included.
        share: of its drafts that were right lately.
    """

    request: Request
    computed: int = 0
    share: float = FIRST_GUESS


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
        self._rewinds = not pooled.profile.recurrent
        self._embedding_rows = pooled.profile.embedding_rows
        self._allocator = pooled.allocator
        self._runner = pooled.runner
        self._shadows: dict[int, _Shadow] = {}
        self._has_failed = False

    @classmethod
    def beside(
        cls, target: PooledModel, model: nn.Module, profile: ModelProfile, num_tokens: int
    ) -> "DraftModel":
        """A drafter whose pool has room for as many tokens as the target's."""
        room = target.pool.num_blocks // target.plan.width
        config = target.config.of_pool(
            num_blocks=room, prefill_chunk=CATCH_UP, kv_bits=None, kv_disk=None
        )
        if profile.recurrent:  # of its drafts' states none is worth a snapshot
            config = config.of_pool(prefix_cache=False)
        return cls(PooledModel(MeasuredModel.of(model, profile, config)), num_tokens)

    def likelihood(self, request: Request) -> float:
        if self._has_failed:
            return 0.0
        shadow = self._shadows.get(request.id)
        if shadow is None:
            return FIRST_GUESS
        shadow.share += RETURN_RATE * (FIRST_GUESS - shadow.share)
        return shadow.share

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        started, self._trace_seconds = time.perf_counter(), 0.0
        drafts: dict[int, list[int]] = {}
        try:
            by_id = {r.id: depth for r, depth in zip(requests, depths, strict=True)}
            drafts = self._drafts(by_id, requests)
        except DeviceError as error:  # of any model: the engine recovers from it
            LOGGER.warning("no drafts of this step: %s", error)
        except Exception as error:
            LOGGER.warning("the draft model failed, and no more drafts are made: %s", error)
            self._has_failed = True
        self.seconds = time.perf_counter() - started
        per_draft = (self.seconds - self._trace_seconds) / max(depths)
        before = self.seconds_per_draft or per_draft
        self.seconds_per_draft = before + RATE * (min(per_draft, 4 * before) - before)
        return [drafts.get(request.id, []) for request in requests]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        shadow = self._shadows[request.id]
        own, known = shadow.request, len(shadow.request.tokens)
        own.num_computed = min(shadow.computed, known + accepted)
        for is_right in [1] * accepted + [0] * (accepted < drafted):
            shadow.share += RATE * (is_right - shadow.share)

    def drop(self, request: Request) -> None:
        self._forget(request)
        if not self._shadows:
            self._runner.release(self._allocator.take_released())

    def _forget(self, request: Request) -> None:
        shadow = self._shadows.pop(request.id, None)
        if shadow is not None and request.id in self._allocator:
            known, count = shadow.request.tokens, shadow.request.num_computed
            self._allocator.truncate(request.id, count)
            self._allocator.register_tail(request.id, known, min(count, len(known)))
            self._allocator.free(request.id)

    def recover(self) -> None:
        for request_id in self._shadows:
            self._allocator.free(request_id)
        self._shadows.clear()
        self._allocator.forget_prefixes()
        self._runner.recover()

    def _drafts(self, depths: dict[int, int], requests: list[Request]) -> dict[int, list[int]]:
        """Drafts of at most these depths by request id, one step of the model for each."""
        step, room = Step(), CATCH_UP
        for request in requests:
            room -= self._read(step, request, room)
        drafting = [span.request for span in step.spans if span.samples]
        launched = [self._launch(step, None)] if step.spans else []
        for depth in range(1, max(depths.values())):
            drafting = [shadow for shadow in drafting if depths[shadow.id] > depth]
            step = Step()
            for shadow in drafting:
                self._add(step, shadow, shadow.num_computed + 1)
            if not step.spans:
                break
            drafting = [span.request for span in step.spans]
            launched.append(self._launch(step, launched[-1]))
        drafts: dict[int, list[int]] = {}
        for each in launched:
            for choice in self._runner.collect(each):
                drafts.setdefault(choice.request.id, []).append(choice.token)
        for known in [self._shadows[r.id] for r in requests if r.id in self._shadows]:
            own, known.computed = known.request, known.request.num_computed
            own.num_computed = min(own.num_computed, len(own.tokens))  # until they are verified
        return drafts

    def _read(self, step: Step, request: Request, room: int) -> int:
        """Add a span of the request's tokens that the model has not read; how many these are."""
        shadow = self._shadows.get(request.id) or self._admit(step, request)
        if shadow is None or room <= 0:
            return 0
        own = shadow.request
        own.tokens += request.tokens[len(own.tokens) :]
        if own.num_computed >= len(own.tokens) and not self._rewinds:
            return 0  # there are no states before the newest token
        # Drafts that no step computed are not verified. The newest token chooses the next one.
        own.num_computed = min(own.num_computed, len(own.tokens) - 1)
        self._allocator.truncate(own.id, own.num_computed)
        self._allocator.register_prefix(own.id, own.tokens, own.num_computed)
        self._allocator.trim(own.id, own.num_computed, offers=True)
        start = own.num_computed
        return self._add(step, own, min(len(own.tokens), start + room)) - start

    def _admit(self, step: Step, request: Request) -> _Shadow | None:
        if max(request.tokens) >= self._embedding_rows:  # of a prompt: others have no such ids
            return None
        own = Request(
            request.id,
            list(request.tokens),
            request.params,
            request.seed,
            salt=request.salt,
            num_prompt=request.num_prompt,
        )
        for _ in range(1 + len(self._shadows)):
            try:
                tokens = own.tokens
                known = tokens if self._rewinds else None
                found = self._allocator.admit(own.id, len(tokens), tokens=known, salt=own.salt)
            except OutOfBlocksError:
                self._evict(step)
                continue
            step.copies += found.copies
            own.num_computed = found.num_cached
            shadow = self._shadows[request.id] = _Shadow(own)
            return shadow
        return None

    def _evict(self, step: Step) -> None:
        """Free the blocks of the oldest request that this step does not compute."""
        for request_id, shadow in self._shadows.items():
            if request_id not in step.requests:
                self._forget(shadow.request)
                return

    def _add(self, step: Step, own: Request, stop: int) -> int:
        """Compute the request's positions up to `stop`, if there are blocks; where it is then."""
        start = own.num_computed
        try:
            step.copies += self._allocator.make_writable(own.id, start, stop)
        except OutOfBlocksError:
            return start
        own.num_computed = stop
        known = len(own.tokens)
        move = self._allocator.advance(own.id, start, stop, is_sure=start < known)
        step.add(Span.of(own, start, stop, stop >= known, move))
        return stop

    def _launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        step.released = self._allocator.take_released()
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
