"""A model of hashes that computes steps without mlx, and notices every wrong slot of its pool.

What it keeps for a token depends, as real K/V does, on the token, its position and on everything
before it as read through the block table; the salt counts too, so that tenants cannot share. A
stale copy, a wrong table or a prefix that was never computed all change the tokens to come.
"""

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.attention.shared_prefixes import SharedPrefixes
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockCopy, BlockTransfer
from mlx_paged.request import Request
from mlx_paged.scheduler.cost_model import features_of
from mlx_paged.scheduler.step import SampledToken, Span, Step, StepReport, StepWork
from tests.support.simulation.hash_model import (
    MASK,
    allowed,
    empty_context,
    extended,
    kv_of,
    logprobs_of,
    next_token,
)

IntArray = npt.NDArray[np.int64]


class FakePool:
    """Slots of a token, its position and its K/V; ``violations`` are reads of anything wrong.

    Where a group divides an entry into pieces, its tokens are as many slots apart.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size)
        self.tokens = np.full(shape, -1)
        self.positions = np.full(shape, -1)
        self.kv = np.zeros(shape, np.uint64)
        self.violations: list[str] = []

    def resize(self, num_blocks: int, kept: npt.NDArray[np.int32] | None) -> None:
        """Keep some blocks, or all, as the first ones; nothing else can be trusted."""
        before = self.tokens, self.positions, self.kv
        kept = np.arange(len(self.tokens), dtype=np.int32) if kept is None else kept
        self.tokens, self.positions, self.kv = (
            np.full((num_blocks, array.shape[1]), -1).astype(array.dtype) for array in before
        )
        for new, old in zip((self.tokens, self.positions, self.kv), before, strict=True):
            new[: len(kept)] = old[kept]

    def poison(self) -> None:
        """Nothing in it can be trusted."""
        self.tokens[:] = self.positions[:] = -1

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy blocks as a device does that performs all copies of a step at once."""
        src, dst = [c.src for c in copies], [c.dst for c in copies]
        if set(src) & set(dst) or len(set(dst)) < len(dst):
            self.violations.append(f"copies depend on their order: {copies}")
        for array in (self.tokens, self.positions, self.kv):
            array[dst] = array[src]

    def transfer(self, transfer: "FakeTransfer") -> None:
        """Take whole blocks out, then put others in."""
        arrays = self.tokens, self.positions, self.kv
        for stored in transfer.stores:
            if stored.blocks:
                stored.payload = b"".join(array[stored.blocks].tobytes() for array in arrays)
        for load in transfer.loads:
            rows, row = load.payload
            payload = rows[row].view(np.int64).reshape(3, len(load.blocks), -1)
            for array, content in zip(arrays, payload, strict=True):
                array[load.blocks] = content.view(array.dtype)

    def write(self, slots: IntArray, start: int, tokens: list[int], kv: list[int]) -> None:
        self.tokens.ravel()[slots] = tokens
        self.positions.ravel()[slots] = np.arange(start, start + len(tokens))
        self.kv.ravel()[slots] = np.array(kv, np.uint64)

    def read(self, slots: IntArray, tokens: list[int], salt: bytes) -> int:
        """The context of a sequence that ought to have these `tokens` in its `slots`."""
        positions = np.arange(len(slots))
        self.check(slots, 0, tokens)
        weights = 2 * positions.astype(np.uint64) + np.uint64(1)
        total = int((self.kv.ravel()[slots] * weights).sum(dtype=np.uint64))
        return (empty_context(salt) + total) & MASK

    def check(self, slots: IntArray, start: int, tokens: list[int]) -> None:
        """Note a violation unless the slots hold `tokens`, the first one at position `start`."""
        positions = np.arange(start, start + len(slots))
        found = self.tokens.ravel()[slots]
        if (found != tokens).any() or (self.positions.ravel()[slots] != positions).any():
            self.violations.append(f"slots {slots} hold {found}, not {tokens}")


@dataclass(slots=True, eq=False)
class State:
    """A recurrent state after `position` tokens; `context` is known once it is computed."""

    position: int
    context: int | None = None


@dataclass(slots=True, eq=False)
class FakeSpan:
    """A span as the device gets it: nothing in it changes when the host goes on."""

    wave: int  # pieces of a span come one after another
    start: int
    stored: int  # tokens whose K/V is there already
    tokens: list[int]  # of the sequence, from its start, as far as they were known
    coming: tuple["FakeLaunch", int] | None  # whose choice is the last token, and which
    slots: IntArray  # of all positions up to the span's end, in layers that see all tokens
    others: list[tuple[int, IntArray]]  # of the other layers: the first position, and the slots
    salt: bytes
    # Requests that get a token, its number, and how many tokens come before it.
    draws: list[tuple[Request, int, int]]
    before: State | None
    after: State

    def known_tokens(self) -> list[int]:
        if self.coming is None:
            return self.tokens
        launch, row = self.coming
        return [*self.tokens, launch.choices[row].token]


@dataclass(slots=True, eq=False)
class FakeLaunch:
    """A step under way; `choices` are there once the device got to it."""

    report: StepReport
    requests: list[Request]
    errors: dict[int, Exception]
    spans: list[FakeSpan]
    copies: list[BlockCopy]
    work: StepWork
    choices: list[SampledToken] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FakeTransfer:
    """Blocks on their way out of the pool, and into it."""

    stores: list[BlockTransfer]
    loads: list[BlockTransfer]


class FakeClock:
    """Seconds that pass only where something is computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, work: StepWork) -> None:
        seconds = (5e-5, 1e-7, 1e-3, 1e-4, 1e-6)
        self.now += sum(s * f for s, f in zip(seconds, features_of(work), strict=True))


class FakeRunner:
    """Computes steps on a :class:`FakePool`, in order, some time between launch and collect.

    Args:
        recurrent: the model has a state beside its K/V, which must agree with it.
        cascade: look for blocks that the sequences of a step share.
        rng: decides whether the device is ahead of the host or behind.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        clock: FakeClock,
        rng: random.Random,
        recurrent: bool,
        cascade: bool = True,
    ) -> None:
        self.allocator = allocator
        self.pool = FakePool(allocator.num_blocks, allocator.block_size)
        self.states: dict[int, State] = {}  # by id
        self.recurrent = recurrent
        self._clock = clock
        self._rng = rng
        self._queue: deque[FakeLaunch | FakeTransfer] = deque()
        self._prefixes = self._new_prefixes()  # kept from step to step
        self._cascade = cascade

    def launch(self, step: Step, before: FakeLaunch | None) -> FakeLaunch:
        report = StepReport(step)
        report.figures["shared_keys"] = self._shared_keys([s.request.id for s in step.spans])
        spans = [
            self._span(piece, wave, before)
            for span in step.spans
            for wave, piece in enumerate(span.pieces())
        ]
        self.release(step.released)
        requests = [request for span in spans for request, *_ in span.draws]
        errors, copies = _errors(requests), list(step.copies)
        launch = FakeLaunch(report, requests, errors, spans, copies, step.work)
        self._queue.append(launch)
        if self._rng.random() < 0.3:
            self._compute_until(launch)
        return launch

    def _new_prefixes(self) -> list[SharedPrefixes]:
        groups = range(len(self.allocator.groups))
        return [SharedPrefixes(self.allocator, group, fewest=1) for group in groups]

    def _shared_keys(self, seq_ids: list[int]) -> int:
        """How many keys are said to be shared; notes a violation if the blocks are not the same."""
        most = 0
        for group, prefixes in enumerate(self._prefixes if self._cascade else []):
            found = prefixes.of(seq_ids, len(seq_ids)) if len(seq_ids) > 1 else None
            if found is None:
                continue
            order, common = found
            most = max(most, prefixes.num_keys)
            rows = [self.allocator.table(seq_ids[i], group) for i in order.tolist()]
            for before, row, keys in zip(rows, rows[1:], common.tolist()[1:], strict=False):
                first = slice(keys // self.allocator.block_size)
                if before[first].tolist() != row[first].tolist() or len(row) < first.stop:
                    self.pool.violations.append(f"{keys} keys are not those of {before} and {row}")
        return most

    def transfer(self, stores: list[BlockTransfer], loads: list[BlockTransfer]) -> None:
        for load in loads:
            if load.state:
                rows, row = load.payload
                self.states[load.state] = State(*json.loads(bytes(rows[row])))
        loads = [load for load in loads if not load.state]
        copies = [replace(stored) for stored in stores]
        for stored, copy in zip(stores, copies, strict=True):
            copy.payload = self.states[stored.state] if stored.state else None
        self._queue.append(FakeTransfer(copies, loads))
        for stored, copy in zip(stores, copies, strict=True):
            stored.payload = partial(self._content, copy)

    def _content(self, stored: BlockTransfer) -> bytes:
        if not stored.blocks:
            assert stored.payload.context is not None, "a state that is not computed yet"
            return json.dumps([stored.payload.position, stored.payload.context]).encode()
        while stored.payload is None:
            self._compute(self._queue.popleft())
        return stored.payload

    def collect(self, launched: FakeLaunch) -> list[SampledToken]:
        self._compute_until(launched)
        self._clock.spend(launched.work)
        return launched.choices

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        for state_id in state_ids:
            self.states.pop(state_id, None)

    def resize(self, num_blocks: int, kept: npt.NDArray[np.int32] | None = None) -> None:
        while self._queue:
            self._compute(self._queue.popleft())
        self.pool.resize(num_blocks, kept)
        self._prefixes = self._new_prefixes()

    def recover(self, error=None) -> None:
        self._queue.clear()
        self.states.clear()
        self.pool.poison()

    # On the host

    def _span(self, span: Span, wave: int, before: FakeLaunch | None) -> FakeSpan:
        request = span.request
        tokens = request.keys[: span.stop - len(span.further)] + list(span.further)
        coming = None
        if len(tokens) < span.stop:
            assert before is not None and len(span) == 1, "a token nobody chooses, or in a chunk"
            coming = (before, before.requests.index(request))
        stop = span.stop - len(span.further)
        draws = [(r, r.num_generated, stop) for r in (request, *span.forks) if span.samples]
        draws += [(request, draws[0][1] + i, stop + i) for i in range(1, 1 + len(span.further))]
        state, after = self.states.get(span.reads), State(span.stop)
        if self.recurrent:
            if span.start and (state is None or state.position != span.start):
                self.pool.violations.append(f"{state} before the span from {span.start}")
            (left,) = span.leaves
            if left.position != span.stop or left.id in self.states:
                self.pool.violations.append(f"{left} after the span up to {span.stop}")
            self.states[left.id] = after
        elif span.stored or span.reads or span.leaves:
            self.pool.violations.append("a model without states has a state")
        return FakeSpan(
            wave=wave,
            start=span.start,
            stored=span.stored,
            tokens=tokens,
            coming=coming,
            slots=self.allocator.slots(request.id, 0, span.stop).astype(np.int64)
            * self.allocator.groups[0].pieces,
            others=self._other_slots(request.id, span.start, span.stop),
            salt=request.salt,
            draws=draws,
            before=state if self.recurrent and span.start else None,
            after=after,
        )

    def _other_slots(self, seq_id: int, start: int, stop: int) -> list[tuple[int, IntArray]]:
        """The slots that the layers of all but the first member of the first group read and write,
        with the first position that each of them sees."""
        found = []
        for index, group in enumerate(self.allocator.groups):
            first = group.kept_from(start + 1)
            positions = np.arange(first, stop, dtype=np.int32)
            entries = self.allocator.table(seq_id, index)[positions // self.allocator.block_size]
            members = self.allocator.store.slots(entries, positions, index).astype(np.int64)
            found += [(first, slots * group.pieces) for slots in members[index == 0 :]]
        return found

    # On the device

    def _compute_until(self, launch: FakeLaunch) -> None:
        while launch in self._queue:
            self._compute(self._queue.popleft())

    def _compute(self, launch: "FakeLaunch | FakeTransfer") -> None:
        if isinstance(launch, FakeTransfer):
            self.pool.transfer(launch)
            return
        self.pool.copy(launch.copies)
        written = np.concatenate(
            [
                slots[span.start + span.stored - first :]
                for span in launch.spans
                for first, slots in [(0, span.slots), *span.others]
            ]
        )
        if len(np.unique(written)) < len(written):
            self.pool.violations.append("two spans of a step write the same slot")
        for wave in range(1 + max(span.wave for span in launch.spans)):
            spans = [span for span in launch.spans if span.wave == wave]
            kv = [self._kv(span) for span in spans]
            for span, values in zip(spans, kv, strict=True):
                start = span.start + span.stored
                new, values = span.known_tokens()[start:], values[span.stored :]
                self.pool.write(span.slots[start:], start, new, values)
                for first, slots in span.others:
                    known = span.known_tokens()[first:start]
                    self.pool.check(slots[: start - first], first, known)
                    self.pool.write(slots[start - first :], start, new, values)
        count = max((request.params.logprobs for request in launch.requests), default=0)
        for span in launch.spans:
            tokens = span.known_tokens()
            for request, number, stop in span.draws:
                context = self.pool.read(span.slots[:stop], tokens[:stop], span.salt)
                own = tokens[_begin(request) : stop]
                launch.choices.append(_choice(context, request, number, count, own))
        for row, error in launch.errors.items():
            launch.choices[row] = SampledToken(launch.requests[row], 0, 0.0, error=error)

    def _kv(self, span: FakeSpan) -> list[int]:
        tokens = span.known_tokens()
        context = self.pool.read(span.slots[: span.start], tokens[: span.start], span.salt)
        if span.before is not None and span.before.context != context:
            self.pool.violations.append(f"{span.before} disagrees with the pool")
        values = []
        for position in range(span.start, len(tokens)):
            values.append(kv_of(context, tokens[position], position))
            context = extended(context, values[-1], position)
        span.after.context = context
        return values


def _begin(request: Request) -> int:
    """Where the text begins that its grammar follows."""
    grammar: Any = request.constraint
    return 0 if grammar is None else grammar.matcher.begin


def _choice(context: int, request: Request, index: int, count: int, own: list[int]) -> SampledToken:
    """A request's token, after its `own` ones; with it `count` likely ones if it asked for any,
    else as many of none."""
    logprobs = logprobs_of(context)
    may_follow = None if request.constraint is None else allowed(request.params, own)
    token = next_token(context, request.params, request.seed, index, may_follow)
    best = np.argsort(-logprobs, kind="stable")[:count].tolist()
    top = tuple((candidate, float(logprobs[candidate])) for candidate in best)
    if not request.params.logprobs:
        top = ((0, -np.inf),) * len(top)
    return SampledToken(request, token, float(logprobs[token]), top)


def _errors(requests: list[Request]) -> dict[int, Exception]:
    """What the requests' processors raise, by row; they see how many tokens there are."""
    errors: dict[int, Exception] = {}
    for row, request in enumerate(requests):
        try:
            for processor in request.params.logits_processors:
                processor(range(request.num_tokens), None)
        except Exception as error:
            errors[row] = error
    return errors
