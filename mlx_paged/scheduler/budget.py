"""How many prompt tokens a step computes besides its decodes. Knows no mlx."""

from mlx_paged.request import Request
from mlx_paged.scheduler.command_bound import CommandBound
from mlx_paged.scheduler.cost_model import CostModel
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span, StepWork

MIN_CHUNK = 16
"""Prompt tokens that each step computes even if it exceeds `max_stall`. So a prompt of P tokens
takes at most P / MIN_CHUNK steps, besides those in which others overtake it."""

ALONE_CHUNK = 2048
"""Prompt tokens of a step at most if nothing else runs or waits, as many as mlx-lm's: each step of
a prompt gathers all of its K/V again."""

ALONE_SECONDS = 2.0
"""Predicted seconds at most of such a step, which a request that arrives waits for."""

MOST_SCORED = 64
"""Prompt tokens of a step at most that get a log-probability: each needs a row of logits."""


def longest_chunk(prefill_chunk: int) -> int:
    """Prompt tokens of a step at most if nothing else runs or waits, where `prefill_chunk` is the
    limit of other steps: four times as many, up to :data:`ALONE_CHUNK`."""
    return min(4 * prefill_chunk, max(ALONE_CHUNK, prefill_chunk))


class ChunkBudget:
    """Limits the prompt tokens of a step and, if it has decodes, its predicted time.

    Attributes:
        prefill_chunk: prompt tokens of a step at most, while memory is not short.
        share: the part of this number, and of larger ones, that counts at present: a power of two.
    """

    def __init__(
        self,
        prefill_chunk: int,  # prompt tokens of a step at most
        # Predicted seconds of a step with decodes at most. MIN_CHUNK tokens may take longer. None:
        # there is no bound.
        max_stall: float | None,
        learns: bool = False,  # whether others than the bound need predictions
        few_sizes: bool = False,  # whether chunks are rounded: few numbers of rows occur
        bound: CommandBound | None = None,  # of a GPU's commands; None: there is none
    ) -> None:
        self.prefill_chunk, self.share = prefill_chunk, 1.0
        self.max_stall = max_stall
        self.cost = CostModel()  # predicts the time of a step
        # Whether anyone needs `cost` to follow the times of steps.
        self.learns = learns or max_stall is not None
        self.few_sizes = few_sizes
        self._bound = bound
        self.pauses = False  # whether it does so for a stall bound only

    @property
    def chunk(self) -> int:
        """Prompt tokens of a step at most, at present."""
        return max(1, int(self.prefill_chunk * self.share))

    def shorten(self, least: int) -> bool:
        """Let half as many prompt tokens count, but `least` or more; returns whether they do."""
        if self.prefill_chunk * self.share / 2 < least:
            return False
        self.share /= 2
        return True

    def lengthen(self) -> None:
        """Let twice as many count, up to all."""
        self.share = min(1.0, 2 * self.share)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from the time of a step."""
        pauses = self.pauses and self.max_stall is None and not work.chunk_tokens
        if seconds > 0 and not pauses:
            self.cost.observe(work, seconds)

    def seconds_to_compute(self, start: int, stop: int) -> float:
        """Predicted seconds of a prompt's tokens ``[start, stop)``; 0: unknown."""
        return self.cost.predict(StepWork.chunk(start, stop - start))

    def alone_chunk(self, longest: int, start: int) -> int:
        """Prompt tokens, up to `longest`, of a step with nothing but a prompt from position `start`
        on. If the times of steps are known, more than `prefill_chunk` take ALONE_SECONDS at
        most."""
        longest = max(1, int(longest * self.share))
        if not self.learns:
            return longest
        least = self.chunk
        return self.cost.chunk_within(ALONE_SECONDS, StepWork(), start, longest, least)

    def left(self, planning: Planning, request: Request) -> int:
        """How many prompt tokens of `request` the step can still compute."""
        limit = planning.max_chunk_tokens
        if limit is None:
            limit = self.chunk
        wanted = min(request.num_pending, limit - planning.work.chunk_tokens)
        if request.prompt_logprobs is not None:
            wanted = _scorable(planning, request, wanted)
        least = max(0, MIN_CHUNK - planning.work.chunk_tokens)
        if self._bound is not None and wanted > least:
            of_request = planning.work, request.num_computed, wanted, least
            wanted = self._bound.chunk_within(*of_request)
        if self.max_stall is not None and planning.work.decode_rows > 0 and wanted > 0:
            wanted = self.cost.chunk_within(
                self.max_stall,
                planning.work,
                start=request.num_computed,
                wanted=wanted,
                minimum=least,
            )
        return self._evened(planning, request, wanted)

    def _evened(self, planning: Planning, request: Request, wanted: int) -> int:
        """Up to an eighth of the step's prompt tokens fewer, if the prompt goes on after them, so
        that the step's rows are a multiple of 64, or of less if they are few. Arrays of many
        different sizes could not take each other's memory."""
        chunk = planning.work.chunk_tokens + wanted
        rows = planning.work.decode_rows + chunk
        fewer = rows % max(8, min(64, (1 << rows.bit_length()) // 16))
        is_too_few = 8 * fewer > chunk or chunk - fewer < MIN_CHUNK
        if not self.few_sizes or wanted in (0, request.num_pending) or is_too_few:
            return wanted
        return max(0, wanted - fewer)

    def can_start(self, planning: Planning, request: Request, block_size: int | None) -> bool:
        """Whether the step can compute enough of a waiting request, and none of its blocks is
        computed in it already; no `block_size`: nothing is shared. With `max_stall`, steps often
        have time left for a few tokens. Requests admitted for these would hold blocks and not
        finish earlier."""
        least, budget = 1, self.left(planning, request)
        if self.max_stall is not None:
            least = min(MIN_CHUNK, self.chunk, request.num_pending)
        if budget < least or block_size is None:
            return budget >= least
        return not is_under_way(request, planning, budget, block_size)


def _scorable(planning: Planning, request: Request, wanted: int) -> int:
    """How many of the `wanted` tokens, which get log-probabilities, the step can still compute."""
    start, spans = request.num_computed, planning.spans
    room = MOST_SCORED - sum(len(span.request.scored(span.start, span.stop)) for span in spans)
    rows = request.scored(start, start + wanted)
    return min(wanted, rows.start - start + room) if rows else wanted


def is_under_way(request: Request, planning: Planning, budget: int, block_size: int) -> bool:
    """Whether the step, which can compute `budget` more prompt tokens, already computes half of
    what `request` would compute for another one. Then the request should wait: after the step it
    finds these blocks in the prefix cache, and the budget goes to other prompts."""
    for span in planning.spans:
        if len(span) > 1 and span.request.root == request.root:
            own = min(len(request.tokens) - span.start, budget)  # with hits up to the span
            if 2 * _shared_tokens(request, span, block_size) >= max(1, own):
                return True
    return False


def _shared_tokens(request: Request, span: Span, block_size: int) -> int:
    """Number of the request's tokens in full blocks that the span computes."""
    ours, theirs = request.keys, span.request.keys
    start = stop = span.start // block_size * block_size
    if ours[:start] != theirs[:start]:
        return 0
    last = min(span.stop, len(ours))
    while stop + block_size <= last:
        end = stop + block_size
        if ours[stop:end] != theirs[stop:end]:
            break
        stop = end
    return stop - start
