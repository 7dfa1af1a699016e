"""Who waits, runs and is parked, and the blocks that they hold. Knows no mlx."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from fractions import Fraction

from mlx_paged.arguments import require
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.request import PoolShrunkError, Request
from mlx_paged.scheduler.progress import Planning, Progress
from mlx_paged.scheduler.tier import Prefetch
from mlx_paged.scheduler.waiting import Waiting


class Places:
    """The requests that are not ended, and what they hold of the pool.

    A request waits, runs, or has ended. If a running request needs a block and none is free,
    another request is preempted: its blocks are freed, and its tokens are computed again later.
    Parked sequences hold blocks but are not computed: forks that wait, and ended requests kept for
    later forks. They lose their blocks before any running request is preempted.

    Attributes:
        clock: seconds, for all times of requests and steps; the engine has the same.
        prefetch: brings K/V from beyond the pool for requests, which may wait for it.
    """

    prefetch: Prefetch

    def __init__(
        self,
        allocator: BlockAllocator,
        max_running: int,
        *,
        prefix_cache: bool = True,  # whether prompts with equal prefixes share blocks
        policy: Policy = Policy.FCFS,  # order of the waiting requests
        victims: PreemptionPolicy = PreemptionPolicy.NEWEST,  # which request is preempted
        # Blocks that stay free when a request is admitted while others run. Without them the next
        # steps would preempt the request. At least one block for each running request stays free.
        watermark: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        scores: bool = True,  # whether the runner can compute log-probabilities of prompt tokens
    ) -> None:
        self.allocator = allocator
        self.progress = Progress(allocator)
        self._most_running = max_running
        self._may_run: float = max_running  # at present: fewer after an error of the device
        self.prefix_cache = prefix_cache and allocator.can_share
        self.victims = victims
        self.watermark = watermark
        self._configured = allocator.num_blocks  # blocks, while memory is not short
        self._watermark = Fraction(watermark, self._configured)  # as a part of the pool
        self.clock, self._scores = clock, scores
        self.num_preemptions = 0
        self.waiting = Waiting(policy, clock)
        self.running: dict[int, Request] = {}  # by id, oldest admission first
        self.parked: dict[int, Request] = {}  # by id, oldest first
        self._isolated: dict[int, Request] = {}

    @property
    def max_running(self) -> int:
        """How many requests may run at present."""
        return int(self._may_run)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if the pool cannot hold the request, or the runner not compute it. It is
        a PoolShrunkError if the pool could hold the request at its configured size."""
        wanted = request.params.prompt_logprobs
        can = self._scores or wanted is None
        expected = "None, for several processes compute the model"
        require(can, "add_request", "prompt_logprobs", wanted, expected)
        needed = self.allocator.max_blocks(request.max_kv_tokens)
        if (num_blocks := self.allocator.num_blocks) >= needed:
            return
        message = (
            f"[add_request] {request.num_prompt} prompt tokens and max_tokens "
            f"{request.params.max_tokens} need {needed} KV blocks of "
            f"{self.allocator.block_size}, but the pool has {num_blocks}"
        )
        if needed <= self._configured:
            raise PoolShrunkError(
                f"{message} of {self._configured} while the system is short of memory: expected a"
                " shorter prompt or fewer max_tokens, or the request again later"
            )
        raise ValueError(f"{message}: expected a shorter prompt, fewer max_tokens or a larger pool")

    def add(self, request: Request) -> None:
        """Queue a request. Raises as :meth:`check_fits`."""
        self.check_fits(request)
        self.allocator.retention.expire(self.clock)
        if not self.prefetch.ask(request):
            self.waiting.push(request)

    def park(self, request: Request) -> None:
        """Park a running request that has to wait for others."""
        if request.id in self.running:
            self._stop(request)
            self.parked[request.id] = request

    def unpark(self, request: Request) -> None:
        """Run or queue a parked request: it has got a token, which is not computed yet."""
        if request.id in self.parked and len(self.running) < self.max_running:
            self._start(self.parked.pop(request.id))
        elif request not in self.waiting:
            self.waiting.push(request)

    def release(self, request: Request, is_continued: bool = True) -> None:
        """Free a parked sequence's blocks, if it still has them."""
        if self.parked.pop(request.id, None) is not None:
            self._free(request, is_continued)

    # How large the pool is

    def least_blocks(self, unended: Iterable[Request]) -> int:
        """How small the pool may become: each request that has not ended has to fit alone, also
        one that is neither running nor waiting now."""
        held = *self.running.values(), *self.parked.values(), *self.waiting, *unended
        alive = [request for request in held if not request.finish_reason]
        needed = [self.allocator.max_blocks(request.max_kv_tokens) for request in alive]
        return min(self.allocator.num_blocks, max(needed, default=self.allocator.max_blocks(1)))

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, at present."""
        return self.allocator.num_blocks

    @property
    def blocks_in_use(self) -> int:
        return self.allocator.store.blocks_in_use

    @property
    def blocks_needed(self) -> int:
        """Blocks that sequences hold, and those that the running ones may need for a token more."""
        return self.blocks_in_use + self.allocator.blocks_to_append(len(self.running))

    def shrink(self, num_blocks: int) -> Int32Array:
        """Let the pool have `num_blocks`, :meth:`least_blocks` or more, while no step is under way.
        Known content that no sequence holds goes first, then parked sequences, then running ones.
        Returns the old number of each block that is left."""
        while self.blocks_in_use > num_blocks:
            if self.parked:
                self._evict_parked()
            else:
                self._preempt(self._choose_preempted(self.running.values()))
        self._set_size(num_blocks)
        return self.allocator.compact(num_blocks)

    def grow(self, num_blocks: int) -> None:
        """Let the pool have `num_blocks`, which are more."""
        self._set_size(num_blocks)
        self.allocator.grow(num_blocks)

    def _set_size(self, num_blocks: int) -> None:
        of_pool = self._watermark
        self.watermark = of_pool.numerator * num_blocks // of_pool.denominator

    # What they hold

    def _fork_samples(self, request: Request, num_computed: int) -> tuple[Request, ...]:
        """The other samples of a prompt, on its blocks, which hold `num_computed` tokens."""
        forks = tuple(fork for fork in request.samples if not fork.finish_reason)
        request.samples = []
        for fork in forks:
            fork.prompt_logprobs = request.prompt_logprobs
            self._share(request, fork, num_computed)
        return forks

    def _hand_over_samples(self, request: Request) -> None:
        """The first sample of a prompt ends before the others forked: the next one replaces it."""
        alive = [sample for sample in request.samples if not sample.finish_reason]
        request.samples = []
        if not alive:
            return
        next_sample, *next_sample.samples = alive
        next_sample.prompt_logprobs = request.prompt_logprobs
        if request.id in self.running:
            self._share(request, next_sample, request.num_computed)
        else:
            self.waiting.push(next_sample)

    def _share(self, parent: Request, child: Request, num_computed: int) -> None:
        """Run or park a child on the blocks of its parent, of which `num_computed` tokens count."""
        self.progress.fork(parent, child, num_computed)
        if len(self.running) < self.max_running and not self._isolated:
            self._start(child)
        else:
            self.parked[child.id] = child
            self.waiting.push(child)

    def _spare_blocks(self, request: Request) -> int:
        """Free blocks that admitting `request` must leave for the next steps."""
        if not self.running:
            return 0
        for_samples = self.allocator.blocks_to_append(len(request.samples))
        for_running = self.allocator.blocks_to_append(len(self.running))
        return max(for_running, self.watermark) + for_samples

    def _enter(self, planning: Planning, request: Request, spare: int) -> bool:
        """Make a waiting request a running one if there are blocks for all its tokens."""
        if self.parked.pop(request.id, None) is None and not self._allocate(
            planning, request, spare
        ):
            return False
        self.waiting.remove(request)
        self._start(request)
        return True

    def _start(self, request: Request) -> None:
        self.running[request.id] = request
        self.waiting.started(request)

    def _stop(self, request: Request) -> None:
        del self.running[request.id]
        self.waiting.stopped(request)

    def _claim(self, planning: Planning, request: Request) -> bool:
        """Let a waiting request run in the place and on the blocks of requests that yield to it.
        Returns whether it runs now. False: these are not enough, or a place and blocks are free, so
        that it is admitted as any other, unless it comes before the prompts of other clients."""
        giving = self.waiting.yielding(request, self.running.values())
        max_blocks, free = self.allocator.max_blocks, self.allocator.num_available
        needed = 0
        if request.id not in self.parked:
            needed = max_blocks(request.num_tokens) + self._spare_blocks(request)
        has_place = len(self.running) < self.max_running
        if has_place and needed <= free and not self.waiting.is_first(request):
            return False
        given = sum(max_blocks(each.num_computed) for each in giving)
        if len(self.running) - len(giving) >= self.max_running or needed > free + given:
            giving = []
        if not self._may_start(planning, request):
            return False
        while len(self.running) >= self.max_running or not self._enter(
            planning, request, self._spare_blocks(request)
        ):
            if not giving:
                return False
            victim = self._choose_preempted(giving)
            giving.remove(victim)
            self._preempt(victim)
        return True

    def _may_start(self, planning: Planning, request: Request) -> bool:
        """Whether all that a waiting request needs is a place and blocks."""
        if request.num_in_flight:
            return False
        if request.id not in self.parked and self.prefetch.delays(request, planning.loads):
            if request.id in self.prefetch.loading:
                self.waiting.remove(request)
            return False
        return True

    def _allocate(self, planning: Planning, request: Request, spare: int) -> bool:
        while True:
            try:
                known = request.reusable if self.prefix_cache else None
                admission = self.progress.admit(request, known, spare)
                break
            except OutOfBlocksError:
                if not self.parked:
                    return False
                self._evict_parked()
        planning.copies += admission.copies
        miss = self.prefetch.admitted(request, admission)
        if request.num_preempted == 0:
            request.prefix_miss = miss
            request.admitted_time = self.clock()
        return True

    def _make_room(self, planning: Planning) -> Request:
        """Free the blocks of a parked or running request; return that request."""
        if self.parked:
            return self._evict_parked()
        candidates = [r for r in self.running.values() if r.id not in planning.requests]
        victim = self._choose_preempted(candidates)
        self._preempt(victim)
        planning.requests.add(victim.id)
        return victim

    def _choose_preempted(self, candidates: Collection[Request]) -> Request:
        running = self.running.values()
        return self.waiting.choose_preempted(candidates, running, self.victims)

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it; its tokens are computed again later."""
        self._stop(request)
        self.progress.free(request)
        request.num_preempted += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _evict_parked(self) -> Request:
        """Free the oldest parked sequence's blocks; if it waits, it is computed again later."""
        request = self.parked.pop(next(iter(self.parked)))
        self.progress.free(request)
        return request

    def _leave_running(self, request: Request, is_continued: bool = True) -> None:
        """Stop running a request. The last token's K/V is never needed."""
        self._stop(request)
        if request.keep_blocks:
            self.parked[request.id] = request
        else:
            self._free(request, is_continued)

    def _free(self, request: Request, is_continued: bool) -> None:
        """Free the blocks of a request. Prompts that begin with its tokens can still reuse them."""
        length = min(request.num_computed, len(request.tokens))
        if self.prefix_cache and length:
            self.allocator.register_tail(request.id, request.keys, length)
            if is_continued and length == request.num_computed:
                self.allocator.keep_end(request.id, request.keys)
        self.allocator.free(request.id)
        for stop, seconds in request.marks if not request.is_background else ():
            tokens, now = request.keys[: min(stop, length)], self.clock()
            self.allocator.retention.mark(tokens, request.root, seconds, now)
        if request.params.retain is not None:
            self._retain(request, length)

    def _retain(self, request: Request, num_known: int) -> None:
        """Keep or forget the K/V of a request that has ended, as the request says."""
        wish, retention = request.params.retain, self.allocator.retention
        tokens = request.keys[:num_known]
        if wish == "drop":
            retention.drop(tokens, request.root)
            return
        until = math.inf if isinstance(wish, str) else self.clock() + float(wish or 0)
        request.pinned = retention.pin(tokens, request.root, until)
