"""Which tokens are computed in a step: decodes first, then prompt chunks. Knows no mlx."""

from collections.abc import Iterable

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.kv.prefix_cache import MissReason
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget, is_under_way
from mlx_paged.scheduler.policies import Policy, PreemptionPolicy, WaitingQueue, choose_preempted
from mlx_paged.scheduler.snapshot_plan import SnapshotPlan
from mlx_paged.scheduler.step import Span, Step, sort_by_pending


class Scheduler:
    """Decodes first, prompt chunks while the budget lasts, waiting requests as soon as they fit.

    Every step gives each running request its next token before any prompt is touched, and computes
    a bounded piece of prompts beside them, so that a long prompt cannot freeze running streams
    (stall-free batching; Agrawal et al. 2024, arXiv:2403.02310, section 4.2). The bound is a number
    of tokens and, with `max_stall`, a predicted time. A request whose last token is under way makes
    room in the next step. When a running request finds no block, another one is preempted: its
    blocks are freed and its tokens computed again later.

    A request is waiting, or running, or neither: then it has ended, and may be parked. Parked
    sequences hold blocks without being computed: forks that wait for their turn, and ended requests
    kept for later forks. They are the first to give their blocks back.

    Args:
        allocator: the pool's bookkeeping.
        max_running: requests computed side by side at most.
        prefill_chunk: prompt tokens computed in a step at most.
        prefix_cache: share the blocks of prompts that start alike.
        policy: order of the waiting requests.
        victims: who is preempted.
        max_stall: seconds that a step with running streams may take; None: no such bound.
        watermark: blocks that an admission must leave while others run, so that it is not undone
            by the next steps; at least one for each running request.
        rewinds: whether a sequence's K/V is all there is to it, so that it may go on from any
            point; a recurrent state knows only the last.
        most_snapshots: where it does not, how many prefixes' states are kept; 0: none is shared.
        window: tokens that any layer sees at most, the newest included; blocks that fall out of it
            are given up. None: some layer sees everything.
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
        most_snapshots: int = 0,
        window: int | None = None,
    ) -> None:
        if max_running < 1:
            raise ValueError(f"[Scheduler] max_running is {max_running}: expected >= 1")
        self.allocator = allocator
        self.max_running = max_running
        self.budget = ChunkBudget(prefill_chunk, max_stall)
        self.prefix_cache = prefix_cache and (rewinds or most_snapshots > 0)
        self.victims = victims
        self.watermark = watermark
        self.rewinds = rewinds
        self.window = window
        self._plan: SnapshotPlan | None = None
        if self.prefix_cache and not rewinds:
            self._plan = SnapshotPlan(allocator, most_snapshots)
        self.num_preemptions = 0
        self.waiting = WaitingQueue(policy)
        self.running: dict[int, Request] = {}  # by id, oldest admission first
        self.parked: dict[int, Request] = {}  # by id, oldest first
        self._isolated: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Refuse what could never be computed.

        Raises:
            ValueError: the request needs more blocks than the pool has.
        """
        needed = self.allocator.blocks_needed(request.max_kv_tokens)
        if needed > self.allocator.num_blocks:
            raise ValueError(
                f"[add_request] {request.num_prompt} prompt tokens and max_tokens "
                f"{request.params.max_tokens} need {needed} KV blocks of "
                f"{self.allocator.block_size}, but the pool has {self.allocator.num_blocks}: "
                "expected a shorter prompt, fewer max_tokens or a larger pool"
            )

    def add(self, request: Request) -> None:
        """Queue a request; ValueError as :meth:`check_fits`."""
        self.check_fits(request)
        self.waiting.push(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Start `child`, whose tokens begin with all of `parent`'s, on the parent's blocks.

        It runs at once if a place is free, and else waits with its blocks. Where there is nothing
        to share it waits like any other request.
        """
        is_past = parent.num_computed >= len(child.tokens)
        if parent.id not in self.allocator or (is_past and not self.rewinds):
            self.waiting.push(child)
            return
        self._share(parent, child)
        child.num_computed = min(child.num_computed, len(child.tokens) - 1)

    def schedule(self) -> Step:
        """Pick this step's tokens and make their slots writable."""
        step = Step()
        if self._isolated:
            self._schedule_suspect(step)
            return step
        decodes, chunks, exhausted = sort_by_pending(self.running.values())
        for request in exhausted:
            self._leave_running(request)
        self._schedule_decodes(step, decodes)
        self._schedule_chunks(step, chunks)
        self._admit(step)
        return step

    def complete(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks are freed, cached, or kept parked."""
        self._isolated.pop(request.id, None)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.samples:
            self._hand_over_samples(request)
        if request.id in self.running:
            self._leave_running(request)
        elif not request.keep:
            self.release(request)

    def park(self, request: Request) -> None:
        """Park a running request that cannot go on before others have got where it is."""
        if self.running.pop(request.id, None) is not None:
            self.parked[request.id] = request

    def unpark(self, request: Request) -> None:
        """A parked request has a token to compute again."""
        if request.id in self.parked and len(self.running) < self.max_running:
            self.running[request.id] = self.parked.pop(request.id)
        elif request not in self.waiting:
            self.waiting.push(request)

    def release(self, request: Request) -> None:
        """Give up a parked sequence's blocks, if it still has them."""
        if self.parked.pop(request.id, None) is not None:
            self._free(request)

    def commit(self, step: Step) -> None:
        """The step's K/V is in the pool, or will be before any later step reads it: offer blocks
        that became full for reuse, as far as their tokens are known."""
        if not self.prefix_cache:
            return
        block_size = self.allocator.block_size
        for span in [s for s in step.spans if s.stop % block_size < s.stop - s.start]:
            known = span.stop <= len(span.request.tokens)
            if known and span.request.id in self.allocator:
                self.allocator.register_prefix(span.request.id, span.request.tokens, span.stop)
                for snapshot in span.snapshots:
                    self.allocator.attach_snapshot(span.request.id, span.request.tokens, snapshot)

    def clear(self, request: Request) -> None:
        """The request got a token: no suspicion of an earlier fault remains."""
        if self._isolated.pop(request.id, None) is not None:
            request.num_faults = 0

    def recover(self, failed: Iterable[Request]) -> None:
        """Start over after a step that failed half way, when no K/V can be trusted.

        Every sequence is computed again. The step's requests are run one at a time until each has
        got a token, so that the next failure names its culprit.
        """
        for request in list(self.running.values()):
            self._preempt(request)
        for request in list(self.parked.values()):
            self._evict_parked(request)
        self.allocator.forget_prefixes()
        for request in self.waiting:
            request.num_in_flight = 0
        for request in failed:
            if request.is_finished:
                continue
            request.error = None  # that step's, and nobody has been told
            if request not in self.waiting:  # its last token was under way
                request.num_in_flight = request.num_computed = 0
                self.waiting.push(request)
            self._isolated[request.id] = request

    # What is computed

    def _schedule_decodes(self, step: Step, decodes: list[Request]) -> None:
        if self._is_plain(decodes):
            positions = [request.num_computed for request in decodes]
            step.copies += self.allocator.append_each([r.id for r in decodes], positions)
            step.add_decodes(decodes, positions)
            return
        for request in decodes:
            if request.id in self.running:  # not preempted for one before it
                self._schedule(step, request, 1)

    def _is_plain(self, decodes: list[Request]) -> bool:
        """Whether each of them gets a token and nothing else: no block is given up for it."""
        if self.window is not None or len(decodes) > self.allocator.num_available:
            return False
        return not any([request.samples for request in decodes])

    def _schedule_chunks(self, step: Step, chunks: list[Request]) -> None:
        for i, request in enumerate(chunks, 1):
            budget = self.budget.left(step, request, chunks[i:] + self._next_to_admit())
            if budget > 0 and request.id in self.running:
                self._schedule(step, request, budget)

    def _schedule(self, step: Step, request: Request, budget: int) -> None:
        """Give a running request a span, making room for it if it takes that."""
        start = request.num_computed
        stop = start + min(request.num_pending, budget)
        if self._plan is not None:
            stop = self._plan.stop(request, start, stop)
        if self.window is not None:
            position = max(0, start - self.window + 1)
            self.allocator.trim(request.id, position, offers=self.prefix_cache)
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
        forks = tuple(fork for fork in request.samples if not fork.is_finished)
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

    def _schedule_suspect(self, step: Step) -> None:
        """One request alone, with all others parked."""
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
                break  # preempted or forked just now
            if request.id not in self.parked and not self._is_worth_it(step, request):
                break
            if not self._enter(step, request, self._spare_blocks(request)):
                break
            self.waiting.pop()
            budget = 1 if request.num_pending == 1 else self.budget.left(step, request)
            if budget > 0:
                self._schedule(step, request, budget)

    def _next_to_admit(self) -> list[Request]:
        """Whoever comes next, if there is a place for him."""
        has_place = self.waiting and len(self.running) < self.max_running
        return [self.waiting.peek()] if has_place else []

    def _is_worth_it(self, step: Step, request: Request) -> bool:
        """Whether the step still takes prompt tokens that nobody computes in it already."""
        budget = self.budget.left(step, request)
        enough = budget >= self.budget.least(request)
        if not enough or not self.prefix_cache:
            return enough
        return not is_under_way(request, step, budget, self.allocator.block_size)

    def _spare_blocks(self, request: Request) -> int:
        """Blocks that the admission of `request` must leave for the next steps of all."""
        if not self.running:
            return 0
        return max(len(self.running), self.watermark) + len(request.samples)

    def _enter(self, step: Step, request: Request, spare: int) -> bool:
        """Make a waiting request a running one, if there are blocks for all its tokens."""
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
                self._evict_parked(next(iter(self.parked.values())))
        step.copies += admission.copies
        request.num_computed, request.branch = admission.num_cached, admission.prefix_without_state
        if admission.snapshot is not None:
            step.restores.append((request, admission.snapshot))
        if request.num_preempted == 0:
            request.num_cached = admission.num_cached
            request.prefix_miss = admission.miss if self.prefix_cache else MissReason.DISABLED
        return True

    def _make_room(self, step: Step) -> Request:
        """Free somebody's blocks; return whose."""
        if self.parked:
            parked = next(iter(self.parked.values()))
            self._evict_parked(parked)
            return parked
        candidates = [r for r in self.running.values() if r.id not in step.requests]
        victim = choose_preempted(candidates, self.victims)
        self._preempt(victim)
        step.requests.add(victim.id)
        return victim

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it, its tokens to be computed again."""
        del self.running[request.id]
        self.allocator.free(request.id)
        request.num_computed = 0
        request.num_preempted += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _evict_parked(self, request: Request) -> None:
        """Free a parked sequence's blocks; if it waits, it will be computed again."""
        del self.parked[request.id]
        self.allocator.free(request.id)
        request.num_computed = 0

    def _leave_running(self, request: Request) -> None:
        """A running request needs no further step: the last token's own K/V is never wanted."""
        del self.running[request.id]
        if request.keep:
            self.parked[request.id] = request
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        """Free the blocks, their content on offer to prompts that begin with these tokens."""
        num_computed = min(request.num_computed, len(request.tokens))
        if self.prefix_cache and num_computed:
            self.allocator.register_tail(request.id, request.tokens, num_computed)
            if self._plan is not None:
                self._plan.at_the_end(request)
        self.allocator.free(request.id)

    def _hand_over_samples(self, request: Request) -> None:
        """A prompt's first sample leaves before the others forked off: the next takes its place."""
        alive = [sample for sample in request.samples if not sample.is_finished]
        request.samples = []
        if not alive:
            return
        next_sample, *next_sample.samples = alive
        if request.id in self.running and self.rewinds:
            self._share(request, next_sample)
        else:
            self.waiting.push(next_sample)
