"""Which tokens are computed in a step: decodes first, then prompt chunks. Knows no mlx."""

from collections import deque
from dataclasses import dataclass, field

from mlx_paged.block_allocator import BlockAllocator, BlockCopy, OutOfBlocksError
from mlx_paged.request import Request


@dataclass(frozen=True, slots=True)
class Span:
    """Token positions ``[start, stop)`` of one request, to be computed in this step."""

    request: Request
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether the step yields the request's next token: no known token is left to compute."""
        return self.stop == len(self.request.tokens)


@dataclass(slots=True)
class Step:
    """What one forward of the model is to do; `copies` come before anything is written."""

    spans: list[Span] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class Scheduler:
    """Decodes first, prompt chunks while the budget lasts, waiting requests as soon as they fit.

    Every step gives each running request its next token before any prompt is touched, and computes
    at most `prefill_chunk` prompt tokens beside them, so that a long prompt cannot freeze running
    streams (stall-free batching; Agrawal et al. 2024, arXiv:2403.02310, section 4.2). A request
    that ended is replaced in the next step. When a running request finds no block, the newest one
    is preempted: its blocks are freed and its tokens computed again later.

    Args:
        allocator: the pool's bookkeeping.
        max_running: requests computed side by side at most.
        prefill_chunk: prompt tokens computed in a step at most.
        prefix_cache: share the blocks of prompts that start alike.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_running: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
    ) -> None:
        for name, value in (("max_running", max_running), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"[Scheduler] {name} is {value}: expected >= 1")
        self.allocator = allocator
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = prefix_cache
        self.num_preemptions = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by id, oldest first

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never fit in the pool, however empty.
        """
        needed = self.allocator.blocks_needed(request.max_kv_tokens)
        if needed > self.allocator.num_blocks:
            raise ValueError(
                f"[add_request] {request.num_prompt} prompt tokens and max_tokens "
                f"{request.params.max_tokens} need {needed} KV blocks of "
                f"{self.allocator.block_size}, but the pool has {self.allocator.num_blocks}: "
                "expected a shorter prompt, fewer max_tokens or a larger pool"
            )
        self.waiting.append(request)

    def schedule(self) -> Step:
        """Pick this step's tokens and make their slots writable."""
        step = Step()
        self._schedule_decodes(step)
        budget = self._schedule_chunks(step, self.prefill_chunk)
        self._admit(step, budget)
        return step

    def complete(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if request.id in self.running:
            del self.running[request.id]
            self.allocator.free(request.id)
        else:
            self.waiting.remove(request)

    def _schedule_decodes(self, step: Step) -> None:
        for request in list(self.running.values()):  # oldest first: victims are yet unscheduled
            if request.num_pending == 1 and request.id in self.running:
                self._schedule(step, request, 1)

    def _schedule_chunks(self, step: Step, budget: int) -> int:
        for request in list(self.running.values()):
            if budget == 0:
                break
            if request.num_pending > 1 and request.id in self.running:
                budget -= self._schedule(step, request, budget)
        return budget

    def _schedule(self, step: Step, request: Request, budget: int) -> int:
        """Give a running request a span, preempting newer ones if it takes that."""
        start = request.num_computed
        stop = start + min(request.num_pending, budget)
        while True:
            try:
                copies = self.allocator.make_writable(request.id, start, stop)
            except OutOfBlocksError:
                victim = self._newest_unscheduled(step)
                self._preempt(victim)
                if victim is request:
                    return 0
                continue
            step.copies += copies
            step.spans.append(Span(request, start, stop))
            return stop - start

    def _newest_unscheduled(self, step: Step) -> Request:
        scheduled = {span.request.id for span in step.spans}
        return next(r for r in reversed(self.running.values()) if r.id not in scheduled)

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it first, its tokens to be computed again."""
        del self.running[request.id]
        self.allocator.free(request.id)
        request.num_computed = 0
        request.num_preempted += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, step: Step, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            if not self._allocate(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running[request.id] = request
            budget -= self._schedule(step, request, budget)

    def _allocate(self, request: Request) -> bool:
        """Give a waiting request blocks for all its tokens, sparing one for each running request
        so that it is not admitted only to be preempted."""
        try:
            num_cached = self.allocator.add_sequence(
                request.id,
                len(request.tokens),
                tokens=request.tokens if self.prefix_cache else None,
                spare=len(self.running),
            )
        except OutOfBlocksError:
            return False
        request.num_computed = num_cached
        if request.num_preempted == 0:
            request.num_cached = num_cached
        return True
