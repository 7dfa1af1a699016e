"""Which tokens a step computes: decodes first, then prefill chunks. Knows no mlx."""

from collections.abc import Iterable

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.kv_disk.no_tier import NoTier
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget, is_under_way
from mlx_paged.scheduler.policies import Policy, PreemptionPolicy, WaitingQueue, choose_preempted
from mlx_paged.scheduler.snapshot_plan import SnapshotPlan
from mlx_paged.scheduler.step import Span, Step, sort_by_pending


class Scheduler:
    """Schedules decodes first, then prefill chunks within the budget, then waiting requests.

    Each step computes the next token of every running stream and a bounded number of prompt tokens,
    so that a long prompt cannot stall running streams (stall-free batching; Agrawal et al. 2024,
    arXiv:2403.02310, section 4.2). The bound is a number of tokens and, with `max_stall`, a
    predicted time. A request whose last token is under way leaves the batch in the next step. If a
    running request needs a block and none is free, another request is preempted: its blocks are
    freed, and its tokens are computed again later.

    A request waits, runs, or has ended. Parked sequences hold blocks but are not computed: forks
    that wait, and ended requests kept for later forks. They lose their blocks before any running
    request is preempted.

    Args:
        allocator: owns the blocks.
        max_running: requests computed in a step at most.
        prefill_chunk: prompt tokens computed in a step at most.
        prefix_cache: whether prompts with equal prefixes share blocks.
        policy: order of the waiting requests.
        victims: which request is preempted.
        max_stall: predicted seconds of a step with running streams at most; None: no such bound.
        watermark: free blocks that an admission must leave while others run, so that the next steps
            do not preempt it; at least one for each running request.
        rewinds: whether a sequence can continue from any earlier position. A model with recurrent
            states can not.
        max_snapshots: how many snapshots of recurrent states are kept; 0: no prefix is shared.

        tier: K/V on a disk, and the requests that wait for it.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_running: int,
        prefill_chunk: int,
        *,
        prefix_cache: bool = True,
        policy: Policy = Policy.FCFS,
        victims: PreemptionPolicy = PreemptionPolicy.NEWEST,
        max_stall: float | None = None,
        watermark: int = 0,
        rewinds: bool = True,
        max_snapshots: int = 0,
        tier: NoTier | None = None,
    ) -> None:
        self.allocator = allocator
        self.max_running = max_running
        self.budget = ChunkBudget(prefill_chunk, max_stall)
        self.prefix_cache = prefix_cache and (rewinds or max_snapshots > 0)
        self.victims = victims
        self.watermark = watermark
        self.rewinds = rewinds
        self.tier = NoTier() if tier is None else tier
        self._plan: SnapshotPlan | None = None
        if self.prefix_cache and not rewinds:
            self._plan = SnapshotPlan(allocator, max_snapshots)
        self.num_preemptions = 0
        self.waiting = WaitingQueue(policy)
        self.running: dict[int, Request] = {}  # by id, oldest admission first
        self.parked: dict[int, Request] = {}  # by id, oldest first
        self._isolated: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.tier.loading)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if the request needs more blocks than the pool has."""
        needed = self.allocator.max_blocks(request.max_kv_tokens)
        if needed > self.allocator.num_blocks:
            raise ValueError(
                f"[add_request] {request.num_prompt} prompt tokens and max_tokens "
                f"{request.params.max_tokens} need {needed} KV blocks of "
                f"{self.allocator.block_size}, but the pool has {self.allocator.num_blocks}: "
                "expected a shorter prompt, fewer max_tokens or a larger pool"
            )

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it can never fit."""
        self.check_fits(request)
        if not self.tier.ask(request):
            self.waiting.push(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Start `child`, whose tokens begin with all of `parent`'s, on the parent's blocks.

        The child runs at once if fewer than `max_running` requests run; otherwise it waits with its
        blocks. If there are no blocks to share, it waits as a new request.
        """
        start = min(parent.num_computed, len(child.tokens) - 1)
        can_start = parent.id in self.allocator
        if can_start and parent.num_computed > start:
            can_start = self.rewinds and self.allocator.can_continue(parent.id, start)
        if can_start:
            self._share(parent, child)
            child.num_computed = start
        else:
            self.waiting.push(child)

    def schedule(self) -> Step:
        """Choose this step's tokens and make their slots writable."""
        step = Step()
        if self.tier.exists:
            for request in self.tier.arrived(waits=not (self.waiting or self.running)):
                self.waiting.push(request)
        if self._isolated:
            self._schedule_isolated(step)
        else:
            decodes, chunks, exhausted = sort_by_pending(self.running.values())
            for request in exhausted:
                self._leave_running(request)
            self._schedule_decodes(step, decodes)
            self._schedule_chunks(step, chunks)
            self._admit(step)
        step.stores = self.tier.leaving() if self.tier.exists else []
        return step

    def complete(self, request: Request) -> None:
        """Remove a request. Its blocks are freed, which caches them, or stay parked."""
        self._isolated.pop(request.id, None)
        if request in self.waiting:
            self.waiting.remove(request)
        self.tier.forget(request)
        if request.samples:
            self._hand_over_samples(request)
        if request.id in self.running:
            self._leave_running(request)
        elif not request.keep_blocks:
            self.release(request)

    def park(self, request: Request) -> None:
        """Park a running request that has to wait for others."""
        if self.running.pop(request.id, None) is not None:
            self.parked[request.id] = request

    def unpark(self, request: Request) -> None:
        """Run or queue a parked request, which has a token to compute again."""
        if request.id in self.parked and len(self.running) < self.max_running:
            self.running[request.id] = self.parked.pop(request.id)
        elif request not in self.waiting:
            self.waiting.push(request)

    def release(self, request: Request) -> None:
        """Free a parked sequence's blocks, if it still has them."""
        if self.parked.pop(request.id, None) is not None:
            self._free(request)

    def commit(self, step: Step) -> None:
        """Register the blocks that the step filled, as far as their tokens are known. Their K/V is
        in the pool before any later step reads it."""
        block_size = self.allocator.block_size
        for span in [s for s in step.spans if s.stop % block_size < s.stop - s.start]:
            request = span.request
            if request.id not in self.allocator:
                continue
            if self.prefix_cache and span.stop <= len(request.tokens):
                self.allocator.register_prefix(request.id, request.tokens, span.stop)
                for snapshot in span.snapshots:
                    self.allocator.attach_snapshot(request.id, request.tokens, snapshot)
            self.allocator.trim(request.id, span.stop, offers=self.prefix_cache)

    def clear(self, request: Request) -> None:
        """The request got a token, so it did not cause an earlier fault: do not isolate it."""
        if self._isolated.pop(request.id, None) is not None:
            request.num_faults = 0

    def recover(self, failed: Iterable[Request]) -> None:
        """Start over after a failed step, when all K/V may be wrong.

        All sequences are computed again. The `failed` requests run one at a time until each has a
        token, so that the next failure shows which request causes it.
        """
        for request in list(self.running.values()):
            self._preempt(request)
        while self.parked:
            self._evict_parked()
        self.allocator.forget_prefixes()
        for request in self.waiting:
            request.num_in_flight = 0
        for request in failed:
            if request.finish_reason:
                continue
            request.error = None  # of the failed step; the caller does not know it
            if request not in self.waiting:  # its last token was under way
                request.num_in_flight = request.num_computed = 0
                self.waiting.push(request)
            self._isolated[request.id] = request

    # What is computed

    def _schedule_decodes(self, step: Step, decodes: list[Request]) -> None:
        needed = self.allocator.blocks_to_append(len(decodes))
        fits = needed <= self.allocator.num_available
        if fits and not any([request.samples for request in decodes]):
            positions = [request.num_computed for request in decodes]
            step.copies += self.allocator.append_each([r.id for r in decodes], positions)
            step.add_decodes(decodes, positions)
            return
        for request in decodes:
            if request.id in self.running:  # not preempted by an earlier one
                self._schedule(step, request, 1)

    def _schedule_chunks(self, step: Step, chunks: list[Request]) -> None:
        for i, request in enumerate(chunks, 1):
            budget = self.budget.left(step, request, chunks[i:] + self._next_to_admit())
            if budget > 0 and request.id in self.running:
                self._schedule(step, request, budget)

    def _schedule(self, step: Step, request: Request, budget: int) -> None:
        """Add a span of a running request; preempt others if no block is free."""
        start = request.num_computed
        stop = start + min(request.num_pending, budget)
        if self._plan is not None:
            stop = self._plan.stop(request, start, stop)
        while True:
            try:
                copies = self.allocator.make_writable(request.id, start, stop)
                break
            except OutOfBlocksError:
                if self._make_room(step) is request:
                    return
        step.copies += copies
        request.num_computed = stop
        samples = stop == request.num_tokens
        forks = self._fork_samples(request) if samples and request.samples else ()
        snapshots = self._plan.on_the_way(request, start, stop) if self._plan else ()
        step.add(Span(request, start, stop, samples, forks, snapshots))

    def _fork_samples(self, request: Request) -> tuple[Request, ...]:
        forks = tuple(fork for fork in request.samples if not fork.finish_reason)
        request.samples = []
        for fork in forks:
            self._share(request, fork)
        return forks

    def _share(self, parent: Request, child: Request) -> None:
        self.allocator.fork(parent.id, child.id)
        child.num_computed = child.num_cached = parent.num_computed
        if len(self.running) < self.max_running and not self._isolated:
            self.running[child.id] = child
        else:
            self.parked[child.id] = child
            self.waiting.push(child)

    def _schedule_isolated(self, step: Step) -> None:
        """Compute one isolated request alone."""
        request = next(iter(self._isolated.values()))
        if request.is_exhausted:
            return
        if request.id not in self.running:
            while not self._enter(step, request, spare=0):
                self._make_room(step)
            self.waiting.remove(request)
        if request.num_pending:
            self._schedule(step, request, self.budget.prefill_chunk)

    # Who runs

    def _admit(self, step: Step) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.peek()
            if request.id in step.requests or request.num_in_flight:
                break  # preempted or forked in this step
            if request.id not in self.parked:
                step.loads += self.tier.adopt(request)
                if self.tier.ask(request):
                    self.waiting.pop()
                    continue
                if not self._can_start(step, request):
                    break
            if not self._enter(step, request, self._spare_blocks(request)):
                break
            self.waiting.pop()
            budget = 1 if request.num_pending == 1 else self.budget.left(step, request)
            if budget > 0:
                self._schedule(step, request, budget)

    def _next_to_admit(self) -> list[Request]:
        """The next request to admit, if another one may run."""
        may_run = self.waiting and len(self.running) < self.max_running
        return [self.waiting.peek()] if may_run else []

    def _can_start(self, step: Step, request: Request) -> bool:
        """Whether the step can compute enough prompt tokens that it does not compute already."""
        budget = self.budget.left(step, request)
        enough = budget >= self.budget.min_to_admit(request)
        if not enough or not self.prefix_cache:
            return enough
        return not is_under_way(request, step, budget, self.allocator.block_size)

    def _spare_blocks(self, request: Request) -> int:
        """Free blocks that admitting `request` must leave for the next steps."""
        if not self.running:
            return 0
        num_more = self.allocator.blocks_to_append(len(self.running))
        for_samples = self.allocator.blocks_to_append(len(request.samples))
        return max(num_more, self.watermark) + for_samples

    def _enter(self, step: Step, request: Request, spare: int) -> bool:
        """Make a waiting request a running one if there are blocks for all its tokens."""
        if self.parked.pop(request.id, None) is None and not self._allocate(step, request, spare):
            return False
        self.running[request.id] = request
        return True

    def _allocate(self, step: Step, request: Request, spare: int) -> bool:
        while True:
            try:
                admission = self.allocator.admit(
                    request.id,
                    len(request.tokens),
                    tokens=request.tokens if self.prefix_cache else None,
                    salt=request.salt,
                    spare=spare,
                )
                break
            except OutOfBlocksError:
                if not self.parked:
                    return False
                self._evict_parked()
        step.copies += admission.copies
        miss = self.tier.admitted(request, admission)
        request.num_computed = admission.num_cached
        request.prefix_without_state = admission.prefix_without_state
        if admission.snapshot is not None:
            step.restores.append((request, admission.snapshot))
        if request.num_preempted == 0:
            request.num_cached = admission.num_cached
            request.prefix_miss = miss
        return True

    def _make_room(self, step: Step) -> Request:
        """Free the blocks of a parked or running request; return that request."""
        if self.parked:
            return self._evict_parked()
        candidates = [r for r in self.running.values() if r.id not in step.requests]
        victim = choose_preempted(candidates, self.victims)
        self._preempt(victim)
        step.requests.add(victim.id)
        return victim

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it; its tokens are computed again later."""
        del self.running[request.id]
        self.allocator.free(request.id)
        request.num_computed = 0
        request.num_preempted += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _evict_parked(self) -> Request:
        """Free the oldest parked sequence's blocks; if it waits, it is computed again later."""
        request = self.parked.pop(next(iter(self.parked)))
        self.allocator.free(request.id)
        request.num_computed = 0
        return request

    def _leave_running(self, request: Request) -> None:
        """Stop running a request. The last token's K/V is never needed."""
        del self.running[request.id]
        if request.keep_blocks:
            self.parked[request.id] = request
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        """Free the blocks. Prompts that begin with these tokens can still reuse them."""
        num_computed = min(request.num_computed, len(request.tokens))
        if self.prefix_cache and num_computed:
            self.allocator.register_tail(request.id, request.tokens, num_computed)
            if self._plan is not None:
                self._plan.at_the_end(request)
        self.allocator.free(request.id)

    def _hand_over_samples(self, request: Request) -> None:
        """The first sample of a prompt ends before the others forked: the next one replaces it."""
        alive = [sample for sample in request.samples if not sample.finish_reason]
        request.samples = []
        if not alive:
            return
        next_sample, *next_sample.samples = alive
        if request.id in self.running and self.rewinds:
            self._share(request, next_sample)
        else:
            self.waiting.push(next_sample)
