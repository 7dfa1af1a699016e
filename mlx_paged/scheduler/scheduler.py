"""Which tokens a step computes: decodes first, then prefill chunks. Knows no mlx."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlx_paged.holdings import Holding
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockTransfer, OutOfBlocksError
from mlx_paged.kv.pins import Pinned
from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.command_bound import CommandBound
from mlx_paged.scheduler.decoding import Decoding, MakeDecoding
from mlx_paged.scheduler.levels import Levels
from mlx_paged.scheduler.places import Places
from mlx_paged.scheduler.progress import OneToken, Planning
from mlx_paged.scheduler.step import Span, Step, StepReport
from mlx_paged.scheduler.tier import NoTier, Tier
from mlx_paged.scheduler.turns import Turn, is_overtaken

REGAIN = 1 / 64
"""By how much a step raises the number of requests that may run, after the device has failed."""

PredictSeconds = Callable[[int, int], float]  # of a prompt's tokens ``[start, stop)``


class Scheduler(Places):
    """Schedules decodes first, then prefill chunks within the budget, then waiting requests.

    Each step computes the next token of every running stream and a bounded number of prompt tokens,
    so that a long prompt cannot stall running streams (stall-free batching; Agrawal et al. 2024,
    arXiv:2403.02310, section 4.2). The bound is a number of tokens and, with `max_stall`, a
    predicted time. A request whose last token is under way leaves the batch in the next step.
    """

    def __init__(
        self,
        allocator: BlockAllocator,  # owns the blocks
        max_running: int,  # requests computed in a step at most
        prefill_chunk: int,  # prompt tokens computed in a step at most
        *,
        # Predicted seconds of a step with running streams at most; None: no such bound.
        max_stall: float | None = None,
        # Makes the way to decode; None: each step gives a request one token.
        make_decoding: MakeDecoding | None = None,
        few_sizes: bool = False,  # whether chunks are rounded: few numbers of rows occur
        # Prompt tokens of a step at most if no other request runs or waits; 0: `prefill_chunk`.
        alone_chunk: int = 0,
        bound: CommandBound | None = None,  # of the commands of a GPU
        # Opens the tier, if prefixes are shared.
        open_tier: Callable[[PredictSeconds], Tier] | None = None,
        prefix_cache: bool = True,
        policy: Policy = Policy.FCFS,
        victims: PreemptionPolicy = PreemptionPolicy.NEWEST,
        watermark: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        scores: bool = True,
    ) -> None:
        super().__init__(
            allocator,
            max_running,
            prefix_cache=prefix_cache,
            policy=policy,
            victims=victims,
            watermark=watermark,
            clock=clock,
            scores=scores,
        )
        self.has_tier = open_tier is not None and self.prefix_cache
        learns = make_decoding is not None or self.has_tier
        self.budget = ChunkBudget(prefill_chunk, max_stall, learns, few_sizes, bound)
        self._alone_chunk = alone_chunk
        self.decoding: Decoding = OneToken(allocator)
        if make_decoding is not None:
            self.decoding = make_decoding(allocator, self.budget)
        self._overtook: list[Request] = []  # in the latest step with a long prompt
        self.tier: Tier = NoTier()
        if open_tier is not None and self.has_tier:  # last: an open tier is locked
            self.tier = open_tier(self.budget.seconds_to_compute)
        self.prefetch = self.tier

    def shorten_chunks(self, least: int) -> bool:
        """Halve the prompt tokens of a step, which stay `least` or more; returns whether it did."""
        return self.budget.shorten(least)

    def lengthen_chunks(self) -> None:
        """Take one :meth:`shorten_chunks` back, if there is one."""
        self.budget.lengthen()

    def foresee(self, request: Request) -> None:
        """The next token of a request is known: the step under way, if any, chooses it in vain."""
        self.progress.foresee(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Start `child`, whose tokens begin with all of `parent`'s, on the parent's blocks. It
        waits with them if `max_running` requests run, and as a new request if there are none to
        share."""
        start = min(parent.num_computed, len(parent.tokens), len(child.tokens) - 1)
        can_start = parent.id in self.allocator
        if can_start and parent.num_computed > start:
            can_start = self.allocator.can_go_back(parent.id, start)
        if can_start:
            self._share(parent, child, start)
        else:
            self.waiting.push(child)

    def schedule(self) -> Step:
        """Choose this step's tokens and make their slots writable. While another step is under way,
        a step with a chunk is held back."""
        planning = Planning()
        if self.has_tier:
            for request in self.tier.arrived(waits=not (self.running or self.waiting)):
                self.waiting.push(request)
        if self._isolated:
            self._schedule_isolated(planning)
        else:
            self._schedule_all(planning)
        step = planning.step(
            stores=list(self.tier.leaving.values()),
            released=self.allocator.take_released() if self.allocator.states.released else [],
            rested=self.allocator.take_rested() if self.allocator.states.rested else [],
            is_read_first=self.decoding.reads_first or bool(planning.loads),
            is_held_back=self.progress.num_under_way > 0 and planning.work.chunk_tokens > 0,
        )
        self.progress.plan(step)
        return step

    def complete(self, request: Request, is_continued: bool = True) -> None:
        """Remove a request. Its blocks are freed, which caches them, or stay parked. Unless
        `is_continued`, no prompt is expected to continue it: its last state goes."""
        self._isolated.pop(request.id, None)
        self.decoding.drop(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.waiting.ended(request)
        self.tier.forget(request)
        if request.samples:
            self._hand_over_samples(request)
        if request.id in self.running:
            self._leave_running(request, is_continued)
        elif not request.keep_blocks:
            self.release(request, is_continued)

    def commit(self, step: Step) -> None:
        """Register the blocks that the step filled, as far as their tokens are known. Their K/V is
        in the pool before any later step reads it."""
        size = self.allocator.block_size
        for span in step.spans:
            if span.samples <= 1 and span.stop % size >= span.stop - span.start:
                continue  # it fills no block
            request, stop = span.request, span.own_stop
            if request.id not in self.allocator:
                continue
            if self.prefix_cache and stop <= len(request.tokens):
                self.allocator.register_prefix(request.id, request.keys, stop)
            self.allocator.trim(request.id, stop, offers=self.prefix_cache)

    def begun(self, report: StepReport) -> None:
        """Register what a step fills, which has been launched; its tokens are under way."""
        self.commit(report.step)
        self.progress.launch(report.step)
        store = self.allocator.store
        store.copies_done()
        report.blocks_in_use = store.blocks_in_use

    def settle(self, report: StepReport) -> None:
        """Correct the progress of a step's requests by the tokens that were chosen: those that do
        not count leave the report. Learn from the step's time."""
        step = report.step
        self.progress.settle(report)
        if self.decoding.gives_several:
            self.decoding.learn(report)
        for choice in report.choices if self._isolated else ():
            if choice.error is None:
                self.clear(choice.request)
        self.commit(step)
        if self.budget.learns:
            own_seconds = report.seconds - step.extra_seconds - report.extra_seconds
            self.budget.observe(step.work, own_seconds)

    def take_released(self) -> list[int]:
        """The ids of states that nothing holds any more."""
        return self.allocator.take_released()

    def take_rested(self) -> list[int]:
        """The ids of states that are only kept for later prompts from now on."""
        return self.allocator.take_rested()

    def copies_done(self) -> None:
        """Note that the copies of the planned step have begun, or never will."""
        self.allocator.store.copies_done()

    def discard(self, request: Request) -> None:
        """Remove a request that could not be added. Its blocks are freed."""
        self.complete(request)
        if request.id in self.allocator:  # of a fork, shared before the failure
            self.allocator.free(request.id)

    def clear(self, request: Request) -> None:
        """The request got a token, so it did not cause an earlier fault: do not isolate it."""
        if self._isolated.pop(request.id, None) is not None:
            request.num_faults = 0

    def recover(self, failed: Sequence[Request], halve: bool = False) -> None:
        """Start over after a failed step, when all K/V may be wrong: compute all sequences again.
        The `failed` requests run one at a time until each has a token, so that the next failure
        shows which request causes it. If `halve`, half as many may run together for some time: the
        same batch may run out of memory again."""
        if halve and len(failed) > 1:
            self._may_run = max(1, min(self.max_running, len(failed)) // 2)
        for request in list(self.running.values()):
            self._preempt(request)
        while self.parked:
            self._evict_parked()
        self.allocator.forget_prefixes()
        self.decoding.recover()
        self.progress.lose([*self.waiting, *failed])
        for request in failed:
            request.error = None  # of the failed step; the caller does not know it
            self.tier.forget(request)
            if request not in self.waiting:  # its last token was under way
                self.waiting.push(request)
            self._isolated[request.id] = request

    def copies_when_idle(self) -> list[BlockTransfer]:
        """Blocks to copy out of the pool now, while no step is under way."""
        return self.tier.copies_when_idle()

    def has_more_copies(self) -> bool:
        """Whether an idle engine should copy more blocks."""
        return self.tier.has_more()

    def keep_copies(self, copied: Sequence[BlockTransfer]) -> None:
        """Keep blocks that were copied out of the pool."""
        self.tier.put(copied)

    def leave_tier(self) -> None:
        """Close the tier; requests that waited for it wait in the queue."""
        tier, self.tier, self.has_tier = self.tier, NoTier(), False
        self.prefetch = self.tier
        tier.close()
        for request in tier.loading.values():
            self.waiting.push(request)

    def forget_cached(self) -> None:
        """Forget the K/V of ended requests, and close the tier."""
        self.leave_tier()
        self.allocator.store.drop_idle()

    def pin(self, keys: Sequence[int], salt: bytes, until: float) -> Pinned:
        """Keep the known K/V of a text until then, by the scheduler's clock."""
        retention = self.allocator.retention
        retention.expire(self.clock)  # pins that have ended take no room of this one
        pinned = retention.pin(keys, salt, until)
        retention.expire(self.clock)  # `until` may be now, which ends a pin
        return pinned

    def forget(self, keys: Sequence[int] | None, salt: bytes) -> int:
        """Forget the K/V of a text, or all of a salt; returns how many tokens."""
        retention = self.allocator.retention
        if keys is not None:
            return retention.forget(keys, salt)
        return retention.forget_all(salt) * self.allocator.block_size

    def forget_kept(self) -> bool:
        """Forget what is kept for later prompts beside K/V; returns whether there was anything."""
        return self.allocator.states.forget_kept()

    # What others ask

    @property
    def gives_several(self) -> bool:
        """Whether a step may give a request several tokens."""
        return self.decoding.gives_several

    def tier_metrics(self) -> dict[str, Any] | None:
        """The counters of the tier as plain JSON values; None if there is no tier."""
        return self.tier.metrics()

    def holdings(self) -> list[Holding]:
        """The memory of the tier."""
        return self.tier.holdings()

    def refcount_histogram(self) -> dict[int, int]:
        """How many blocks have each number of references."""
        return self.allocator.store.refcount_histogram()

    def levels(self) -> Levels:
        """What is held at present, and what has been done so far."""
        allocator, store = self.allocator, self.allocator.store
        return Levels(
            running=len(self.running),
            waiting=len(self.waiting.ids) + len(self.tier.loading),
            blocks_in_use=store.blocks_in_use,
            blocks_cached=store.num_idle,
            preemptions=self.num_preemptions,
            cow_clones=store.cow_clones,
            evictions=store.evictions,
            prefix_hit_tokens=allocator.prefix_hit_tokens,
            reported=self.decoding.reported,
        )

    def ahead_of(self, keys: Sequence[int], salt: bytes) -> tuple[int, int]:
        """How many leading tokens of a prompt are known, and how many prompt tokens of requests
        that run or wait are not computed yet."""
        requests = (*self.running.values(), *self.waiting)
        left = sum(max(0, each.num_prompt - each.num_computed) for each in requests)
        return self.allocator.cached_prefix(keys, salt), left

    # What is computed

    def _schedule_all(self, planning: Planning) -> None:
        self._may_run = min(self._most_running, self._may_run + REGAIN)
        decodes, planning.prompts, exhausted = _sort_by_pending(self.running.values())
        for request in exhausted:
            self._leave_running(request)
        if self.waiting.ids and self._take_places(planning):
            decodes, planning.prompts, _ = _sort_by_pending(self.running.values())
        for request in self.decoding.schedule(planning, decodes):
            if request.id in self.running:  # not preempted by an earlier one
                self._schedule(planning, request, 1)
        if planning.prompts or self.waiting.ids:
            self._schedule_prompts(planning)

    def _take_places(self, planning: Planning) -> bool:
        """Let waiting requests run in the places of others that have to give way to them, as many
        as the step has prompt tokens for; returns whether others run now."""
        prompts, num_preemptions = [*planning.prompts], self.num_preemptions
        while (request := self.waiting.claimant()) is not None:
            order = self.waiting.order_of(request)
            before = [each for each in prompts if self.waiting.order_of(each) <= order]
            is_full = sum(each.num_pending for each in before) >= self.budget.chunk
            if is_full or not self._claim(planning, request):
                break
            prompts.append(request)
        return len(prompts) > len(planning.prompts) or self.num_preemptions > num_preemptions

    def _schedule_prompts(self, planning: Planning) -> None:
        """Compute tokens that constraints demand, chunks of running prompts, then waiting ones."""
        if self._alone_chunk and len(self.running) + len(self.waiting) == 1:
            alone = next(iter(self.running.values()), None) or self.waiting.peek()
            start = alone.num_computed
            planning.max_chunk_tokens = self.budget.alone_chunk(self._alone_chunk, start)
        planning.prompts = self.waiting.in_order(planning.prompts)
        for request in planning.prompts:
            if request.constraint is not None and request.num_computed >= request.num_prompt:
                self._compute(planning, request)
        last = [each for each in planning.prompts if self.waiting.is_last(each)]
        for request in planning.prompts[: len(planning.prompts) - len(last)]:
            self._go_on(planning, request)
        self._start_waiting(planning, until_last=True)
        for request in last:
            self._go_on(planning, request)
        self._start_waiting(planning)
        self.waiting.promote(planning.spans, planning.prompts)

    def _go_on(self, planning: Planning, request: Request) -> None:
        self._let_pass(planning, request)
        if self._has_place(planning):
            self._compute(planning, request)

    def _start_waiting(self, planning: Planning, until_last: bool = False) -> None:
        if self.waiting and self._has_place(planning):
            self.waiting.charge(self.running.values())
        while self.waiting and self._has_place(planning):
            first = self.waiting.peek()
            if until_last and self.waiting.is_last(first):
                break
            self._let_pass(planning, first)
            if not self._compute(planning, self.waiting.peek()):
                break

    def _let_pass(self, planning: Planning, first: Request) -> None:
        """Compute the shorter prompts that overtake `first`, if it takes more than this step."""
        if first.id in planning.requests:
            return
        room = self.budget.left(planning, first) if planning.max_chunk_tokens is None else 0
        if not is_overtaken(first, room):
            return
        turn = Turn(planning, first, room, self.waiting, self._overtook)
        self._overtook = turn.overtaking
        planning.max_chunk_tokens = turn.limit
        spare = self.allocator.max_blocks(first.num_tokens) if first in self.waiting else 0
        while self.budget.left(planning, first) > 0 and self._has_place(planning, besides=1):
            request = turn.next()
            if request is None or not self._compute(planning, request, spare):
                break
        planning.max_chunk_tokens = turn.limit_after()

    def _compute(self, planning: Planning, request: Request, spare: int = 0) -> bool:
        """Compute the next chunk of a prompt; False if the prompt waits and cannot start."""
        if request.id in planning.requests:  # preempted or forked
            return False
        if request in self.waiting and not self._admit(planning, request, spare):
            return False
        budget = 1 if request.num_pending == 1 else self.budget.left(planning, request)
        if budget > 0:
            self._schedule(planning, request, budget)
        return True

    def _schedule(self, planning: Planning, request: Request, budget: int) -> None:
        """Add a span of a running request; preempt others if no block is free."""
        start = request.num_computed
        stop = start + min(request.num_pending, budget)
        if self.prefix_cache:
            stop = self.allocator.states.chunk_stop(start, stop, request.num_tokens)
        while True:
            try:
                copies = self.allocator.make_writable(request.id, start, stop)
                break
            except OutOfBlocksError:
                if self._make_room(planning) is request:
                    return
        planning.copies += copies
        samples = stop == request.num_tokens
        text = request if self.prefix_cache else None
        move = self.allocator.advance(request.id, start, stop, text=text)
        forks = self._fork_samples(request, stop) if samples and request.samples else ()
        planning.add(Span.of(request, start, stop, samples, move, forks))

    def _schedule_isolated(self, planning: Planning) -> None:
        request = next(iter(self._isolated.values()))
        if request.is_exhausted:
            return
        if request.id not in self.running:
            while len(self.running) >= self.max_running:
                self._preempt(self._choose_preempted(self.running.values()))
            while not self._enter(planning, request, spare=0):
                self._make_room(planning)
        planning.requests.add(request.id)  # it may preempt any other request, but not itself
        if request.num_pending:
            self._schedule(planning, request, self.budget.left(planning, request))

    def _has_place(self, planning: Planning, besides: int = 0) -> bool:
        """Whether one more may be computed. Prompts that wait for their turn take no place."""
        planned = planning.requests
        paused = sum(r.id in self.running and r.id not in planned for r in planning.prompts)
        return len(self.running) - paused + besides < self.max_running

    def _admit(self, planning: Planning, request: Request, spare: int) -> bool:
        """Let a waiting request run, if the step has room for it and `spare` blocks remain."""
        shares = self.prefix_cache and request.prompt_logprobs is None
        block_size = self.allocator.block_size if shares else None
        has_room = request.id in self.parked or self.budget.can_start(planning, request, block_size)
        if not has_room or not self._may_start(planning, request):
            return False
        return self._enter(planning, request, self._spare_blocks(request) + spare)


def _sort_by_pending(
    requests: Iterable[Request],
) -> tuple[list[Request], list[Request], list[Request]]:
    """Requests with one token to compute, with several, and with no further token to generate."""
    decodes, chunks, exhausted = [], [], []
    for request in requests:  # all requests in each step: properties would double the time
        num_tokens = len(request.tokens) + request.num_in_flight
        limit = request.num_prompt + request.params.max_tokens
        if num_tokens >= limit or request.error is not None:
            exhausted.append(request)
        elif num_tokens - request.num_computed == 1:
            decodes.append(request)
        elif num_tokens > request.num_computed:
            chunks.append(request)
    return decodes, chunks, exhausted
