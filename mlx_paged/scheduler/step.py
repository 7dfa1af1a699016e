"""What one forward pass computes, and what the engine asks of its runner. Knows no mlx."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Generic, NamedTuple, Protocol, TypeVar

from mlx_paged.kv.blocks import BlockCopy, BlockTransfer
from mlx_paged.kv.state_kind import Move, State
from mlx_paged.request import Request


class StepWork(NamedTuple):
    """What a step computes."""

    decode_rows: int = 0  # newest tokens of requests, and known tokens beyond these
    decode_context: int = 0  # sum of the context lengths of these rows
    chunk_tokens: int = 0  # tokens of prefill chunks
    chunk_context: int = 0  # sum of the context lengths of these tokens; position p has p + 1

    @classmethod
    def chunk(cls, start: int, num_tokens: int) -> "StepWork":
        """A prefill chunk of `num_tokens` tokens from position `start`."""
        return cls(0, 0, num_tokens, num_tokens * start + num_tokens * (num_tokens + 1) // 2)

    def __add__(self, other: "StepWork") -> "StepWork":  # type: ignore[override]
        return StepWork(*map(add, self, other))


NO_WORK = StepWork()


@dataclass(slots=True, eq=False)  # not frozen, which would double the time to make one
class Span:
    """Token positions ``[start, stop)`` of one request that a step computes. None of its fields
    changes once the step is planned."""

    request: Request
    start: int
    stop: int
    # How many tokens of the request it chooses: none if known tokens are left to compute, else the
    # next one, and one after each token of `further`.
    samples: int
    # Other samples of the same prompt; each draws its first token in this step.
    forks: tuple[Request, ...] = ()
    # Tokens that may follow the request's own: the span's last ones, `samples` - 1 of them.
    further: tuple[int, ...] = ()
    stored: int = 0  # how many of its first tokens have K/V already
    reads: int = 0  # id of the recurrent states with which it begins; 0: there are none
    # The recurrent states that it leaves, ordered by position; none on a model without such layers.
    leaves: tuple[State, ...] = ()

    @classmethod
    def of(
        cls,
        request: Request,
        start: int,
        stop: int,
        samples: bool,
        move: Move,
        forks: tuple[Request, ...] = (),
        further: tuple[int, ...] = (),
    ) -> "Span":
        """A span that computes the K/V of ``[start, stop)`` and what `move` does to the states."""
        first, reads = move.reads.position, move.reads.id
        count = 1 + len(further) if samples else 0
        return cls(request, first, stop, count, forks, further, start - first, reads, move.leaves)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def own_stop(self) -> int:
        """The position after the last token that is the request's own."""
        return self.stop - max(0, self.samples - 1)

    @property
    def known(self) -> list[int]:
        """Its tokens, with those of `further`; none if its only token is still being chosen."""
        tokens = self.request.tokens[self.start : self.own_stop]
        return [*tokens, *self.further] if self.further else tokens

    def pieces(self) -> list["Span"]:
        """The span cut at the recurrent states that it leaves: each is the state after a piece."""
        if len(self.leaves) < 2:
            return [self]
        pieces, start, reads = list[Span](), self.start, self.reads
        for state in self.leaves:
            is_last = state is self.leaves[-1]
            pieces.append(
                Span(
                    self.request,
                    start,
                    state.position,
                    samples=self.samples if is_last else 0,
                    forks=self.forks if is_last else (),
                    stored=max(0, self.start + self.stored - start),
                    reads=reads,
                    leaves=(state,),
                )
            )
            start, reads = state.position, state.id
        return pieces


@dataclass(slots=True, eq=False)
class Step:
    """The spans that one forward pass computes. None of its fields changes once it is planned. What
    happened in the step is in its :class:`StepReport`."""

    spans: Sequence[Span] = ()
    # Blocks to copy out of the pool before anything in it changes.
    stores: Sequence[BlockTransfer] = ()
    # Blocks to write into the pool after that, before all else.
    loads: Sequence[BlockTransfer] = ()
    # Block copies to perform before any K/V is written.
    copies: Sequence[BlockCopy] = ()
    # Ids of recurrent states that nothing reads after this step.
    released: Sequence[int] = ()
    # Ids of recurrent states that are only kept for later prompts from now on.
    rested: Sequence[int] = ()
    work: StepWork = NO_WORK  # of its spans
    prompt_tokens: int = 0  # prompt tokens computed, also those that are computed again
    is_plain: bool = False  # whether each span chooses one token of its request
    extra_seconds: float = 0.0  # of its planning that are not the scheduler's own
    is_read_first: bool = False  # whether it must be read before the next step is planned
    scores: bool = False  # whether log-probabilities of prompt tokens may be wanted
    # Whether only its first layers begin at once. The rest begins with the next call of the runner
    # for a step, when the tokens of the step before have been returned.
    is_held_back: bool = False

    @property
    def everyone(self) -> list[Request]:
        """All requests that are computed or get a token."""
        return [request for span in self.spans for request in (span.request, *span.forks)]


class SampledToken(NamedTuple):
    """The next token of one request. A beam search uses only `top`."""

    request: Request
    token: int
    logprob: float  # of the token, after penalties, before temperature and filters
    # The most likely tokens and their log-probabilities, best first.
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None  # why there is no token


@dataclass(slots=True)
class StepReport:
    """What happened when a step was computed. The runner, the pipeline and `Progress.settle` fill
    it."""

    step: Step
    figures: dict[str, int] = field(default_factory=dict)  # what its forwards report, by name
    extra_seconds: float = 0.0  # of the launch that are not the model's: traces, images
    # Of a step that is held back, until the rest had begun. MLX waits meanwhile for most of it.
    rest_seconds: float = 0.0
    blocks_in_use: int = 0  # when it had been launched
    launch_seconds: float = 0.0  # building and submitting the graph
    commit_seconds: float = 0.0  # registering what it fills, at its launch
    wait_seconds: float = 0.0  # waiting for the device
    settle_seconds: float = 0.0  # correcting the progress by its tokens
    seconds: float = 0.0  # of the host: launch plus wait. Over all steps their sum is wall time.
    choices: list[SampledToken] = field(default_factory=list)  # of a settled step: those that count
    # Of each request with tokens beyond its own: how many, and how many of them were right.
    verified: list[tuple[Request, int, int]] = field(default_factory=list)


class Launched(Protocol):
    """A step that a runner has started."""

    @property
    def report(self) -> StepReport:
        """What has happened in the step so far."""

    @property
    def requests(self) -> list[Request]:
        """The requests that get a token."""

    @property
    def errors(self) -> dict[int, Exception]:
        """Known errors by index into `requests`."""


LaunchedT = TypeVar("LaunchedT", bound=Launched)


class DeviceError(RuntimeError):
    """The device failed while it computed a step, perhaps without a request's fault."""


class UnknownEndError(DeviceError):
    """Another thread launched the step, and only it can know whether the device failed in it."""


@dataclass(slots=True)
class Observers(Generic[LaunchedT]):
    """Functions that see the steps of an engine as they pass."""

    # Called with a step that has been launched, when what it fills has been registered.
    launched: list[Callable[[LaunchedT], None]] = field(default_factory=list)
    # Called with a step that has been read. Its report is complete; its requests do not have the
    # tokens yet.
    settled: list[Callable[[LaunchedT], None]] = field(default_factory=list)


class Runner(Protocol[LaunchedT]):
    """Computes steps: the model, or a fake one in tests."""

    def launch(self, step: Step, before: LaunchedT | None) -> LaunchedT:
        """Start a step. Input tokens that are not known yet come from `before`. What the step
        releases is forgotten after its spans, which may read it."""

    def transfer(
        self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]
    ) -> Callable[[], None] | None:
        """Start to copy blocks out of the pool, then to write others, before any later step.
        Returns what waits for the copies, and raises if they may be wrong; None: nothing must."""

    def collect(self, launched: LaunchedT) -> list[SampledToken]:
        """Wait for a step; return one token for each of its requests, in order."""

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        """Forget recurrent states, and keep the `rested` ones only for later prompts, while no step
        is planned that has not been launched. Most states are named by steps instead."""

    def recover(self, error: BaseException | None = None) -> None:
        """Discard the steps under way and all states that `error` may have damaged. Until then, an
        error of the device is raised by every launch, and when any step is collected."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that failed: its requests and the exception."""

    requests: list[Request]
    error: BaseException

    @property
    def is_devices(self) -> bool:
        """Whether the device is known to have failed."""
        error = self.error
        return isinstance(error, DeviceError) and not isinstance(error, UnknownEndError)


@dataclass(slots=True)
class StepResult:
    """What happened in one call that advances the engine."""

    # Of the step that ended in the call; None if there was nothing to compute, or the step failed.
    report: StepReport | None = None
    launched: list[StepReport] = field(default_factory=list)  # of the steps that it launched
    plan_seconds: float = 0.0  # planning the step that was launched, or finding nothing to compute
    ready: float = 0.0  # when the call had all this, on the clock without garbage collections
    # The step or one that was launched failed. The tokens of the report are still valid.
    fault: Fault | None = None
