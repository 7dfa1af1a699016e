"""Runs a trace on the real scheduler and allocator, with a runner that computes nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.retention.traces import Ask, Piece, Trace
from mlx_paged import SamplingParams
from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.worth import TOKENS, Work
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.request import Request
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import SampledToken, Span, Step, StepReport

BLOCK_SIZE = 16
MAX_RUNNING = 16
PREFILL_CHUNK = 512


@dataclass(slots=True)
class Launch:
    """A step that takes no time."""

    report: StepReport
    requests: list[Request]
    errors: dict[int, Exception] = field(default_factory=dict)


class AnswerRunner:
    """Gives each request the next token of its given answer."""

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = {}  # by request id

    def launch(self, step: Step, before: Launch | None) -> Launch:
        return Launch(StepReport(step), [span.request for span in step.spans if span.samples])

    def collect(self, launched: Launch) -> list[SampledToken]:
        return [
            SampledToken(request, self.answers[request.id][len(request.generated)], 0.0)
            for request in launched.requests
        ]

    def transfer(self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]) -> None:
        assert not stores and not loads

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        pass

    def recover(self, error: BaseException | None = None) -> None:
        pass


@dataclass(slots=True)
class Text:
    """A piece after others: how many of its tokens are computed, and what has come after it."""

    num_computed: int = 0
    after: dict[Piece, "Text"] = field(default_factory=dict)


class Texts:
    """The texts that have been computed, as a tree of pieces."""

    def __init__(self) -> None:
        self._of_salts: dict[str, Text] = {}

    def add(self, ask: Ask) -> int:
        """Count a request's text as computed, all but the last token of the answer. Returns how
        many of the prompt's leading tokens were computed already."""
        at, known, is_known = self._of_salts.setdefault(ask.salt, Text()), 0, True
        for piece in ask.prompt:
            at = at.after.setdefault(piece, Text())
            known += at.num_computed if is_known else 0
            is_known = is_known and at.num_computed == piece[1]
            at.num_computed = piece[1]
        answer = at.after.setdefault(ask.answer, Text())
        answer.num_computed = max(answer.num_computed, ask.answer[1] - 1)
        return known


@dataclass
class Counts:
    """Tokens by part of the trace.

    Attributes:
        prompts: of all prompts.
        computed: that steps computed.
        again: among them those that had been computed before.
        first: of each request of the watched part, the tokens computed up to its first one.
        operations: those of the tokens that had been computed before.
    """

    prompts: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    first: list[int] = field(default_factory=list)
    operations: int = 0


class Replay:
    """One run of a trace, by a model whose operations are counted."""

    def __init__(self, trace: Trace, allocator: BlockAllocator, work: Work = TOKENS.work) -> None:
        self._trace, self._work = trace, work
        scheduler = Scheduler(allocator, MAX_RUNNING, PREFILL_CHUNK)
        self._runner = AnswerRunner()
        stats = EngineStats(BLOCK_SIZE, 1, allocator.num_blocks)
        self._engine = EngineCore(scheduler, self._runner, stats, lookahead=False)
        self._engine.observers.launched.append(self._see)
        self._texts = Texts()
        self._asks: dict[int, Ask] = {}  # by request id, of those under way
        self._done: dict[int, int] = {}  # by request id: leading tokens that were computed before
        self._counts = Counts()

    def run(self) -> Counts:
        """The tokens that were computed."""
        engine, now, waiting = self._engine, 0, list(reversed(self._trace.asks))
        while waiting or engine.has_work:
            if waiting and not engine.has_work:
                now = max(now, waiting[-1].at)
            while waiting and waiting[-1].at <= now:
                self._add(waiting.pop())
            engine.step()
            now += 1
        return self._counts

    def _add(self, ask: Ask) -> None:
        params = SamplingParams(max_tokens=ask.answer[1])
        tokens = ask.prompt_tokens
        request_id = self._engine.add_request(tokens, params, cache_salt=ask.salt)
        self._runner.answers[request_id] = ask.answer_tokens
        self._asks[request_id] = ask
        self._counts.prompts[ask.who] += len(tokens)

    def _see(self, launched: Launch) -> None:
        for span in launched.report.step.spans:
            self._count(span)

    def _count(self, span: Span) -> None:
        key, ask = span.request.id, self._asks[span.request.id]
        if key not in self._done:
            self._done[key] = self._texts.add(ask)
        counts, done = self._counts, self._done[key]
        counts.computed[ask.who] += len(span)
        again = range(span.start, min(span.stop, done))
        counts.again[ask.who] += len(again)
        counts.operations += self._work.of(again.start, again.stop) if again else 0
        self._done[key] = max(done, span.stop)
        if span.samples and span.stop == span.request.num_prompt and ask.who == self._trace.watched:
            counts.first.append(span.stop - span.request.num_cached)
