"""States of recurrent layers stay joined while the same sequences are computed, and are split and
joined exactly when these change."""

from collections.abc import Iterable
from io import StringIO
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_paged.kv.state_kind import Move, State
from mlx_paged.request import Request
from mlx_paged.runner.recurrent_states import RecurrentStates, forms_of
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import Span


class Layers:
    """Two recurrent layers of three arrays: one keeps every token that it sees up to four, one
    counts them, one is never used. `expected` has each sequence's own tokens, and `newest` the id
    of its state."""

    def __init__(self) -> None:
        self.caches = [ArraysCache(3), ArraysCache(3)]
        self.states = RecurrentStates(self.caches)
        self.expected: dict[int, list[int]] = {}
        self.newest: dict[int, int] = {}
        self.num_ids = 0

    def step(self, *seq_ids: int, padding: int = 0) -> None:
        """A forward of one token of each sequence, which forgets what it reads."""
        spans = self.spans(seq_ids)
        with self.states.computing(spans, False, padding):
            self._forward(seq_ids, padding)
        self.newest |= {span.request.id: span.leaves[0].id for span in spans}
        self.release(*[span.reads for span in spans])

    def spans(self, seq_ids: Iterable[int]) -> list[Span]:
        """The next token of each sequence."""
        params, spans = SamplingParams(), []
        for seq_id in seq_ids:
            start, reads = len(self.expected.get(seq_id, ())), self.newest.get(seq_id, 0)
            self.num_ids += 1
            move = Move(State(reads, start), (State(self.num_ids, start + 1),))
            spans.append(Span.of(Request(seq_id, [], params, 0), start, start + 1, True, move))
        return spans

    def fork(self, parent: int, child: int) -> None:
        self.newest[child] = self.newest[parent]
        self.expected[child] = list(self.expected[parent])

    def drop(self, seq_id: int) -> None:
        del self.expected[seq_id]
        self.release(self.newest.pop(seq_id))

    def release(self, *state_ids: int) -> None:
        """Forget those that no sequence has."""
        self.states.release({*state_ids} - {*self.newest.values()})

    def ids(self, seq_ids: Iterable[int]) -> list[int]:
        return [self.newest[seq_id] for seq_id in seq_ids]

    def separate(self, *seq_ids: int) -> list[mx.array]:
        """The new arrays if these sequences have just been computed."""
        params = SamplingParams()
        spans = [
            Span.of(Request(i, [], params, 0), 0, 1, True, Move(State(0, 0), (State(each, 1),)))
            for i, each in zip(seq_ids, self.ids(seq_ids), strict=True)
        ]
        return self.states.separate(spans)

    def copy(self, seq_id: int) -> Any:
        return self.states.copy(self.newest[seq_id])

    def restore(self, seq_id: int, states: Any, tokens: list[int]) -> None:
        self.num_ids += 1
        self.newest[seq_id] = self.num_ids
        self.states.put(self.num_ids, states)
        self.expected[seq_id] = list(tokens)

    def _forward(self, seq_ids: tuple[int, ...], padding: int) -> None:
        rows = len(seq_ids) + padding
        tokens = [len(self.expected.get(i, ())) + 100 * i for i in seq_ids]
        column = mx.array(tokens + [-1] * padding, mx.float32)[:, None]
        for number, cache in enumerate(self.caches):
            old, count, unused = cache[0], cache[1], cache[2]
            assert unused is None
            new = column + number
            cache[0] = new if old is None else mx.concatenate([old, new], axis=1)[:, -4:]
            cache[1] = mx.ones((rows, 2, 1)) if count is None else count + 1
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            self.expected.setdefault(seq_id, []).append(token)

    def check(self) -> None:
        for seq_id, tokens in self.expected.items():
            for number, (last, count, unused) in enumerate(self.copy(seq_id)):
                assert last.tolist() == [[float(token + number) for token in tokens[-4:]]]
                assert count.tolist() == [[[len(tokens)]] * 2]
                assert unused is None

    def joined(self) -> mx.array:
        """What the next step of the sequences would get if nothing is copied."""
        return self.states.arrays(self.newest.values())[0]


@pytest.fixture
def layers() -> Layers:
    return Layers()


def test_nothing_is_copied_while_the_same_sequences_decode(layers):
    for _ in range(6):
        layers.step(1, 2, 3, padding=1)
        ids = layers.ids([1, 2, 3])
        assert len(layers.states.arrays(ids)) == 4  # of both layers, not of each sequence
        joined = layers.joined()
        layers.states.load(ids, 1)
        assert layers.caches[0][0] is joined
    layers.check()


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(
    "after",
    [(2, 3, 4), (1, 2, 3), (1, 4), (2, 3), (3,), (4, 3, 2, 1), (1, 2, 3, 4), (2, 1, 3, 4), (3, 2)],
)
def test_sequences_leave_and_change_their_order(layers, after, padding):
    layers.step(1, 2, 3, 4, padding=1)
    layers.step(1, 2, 3, 4, padding=1)
    layers.step(*after, padding=padding)
    layers.step(*after, padding=padding)
    layers.check()


def test_however_many_come_from_two_batches_each_array_is_gathered_once():
    """As after drafts, when every other sequence goes on from the state before them."""

    def nodes(count: int) -> int:
        layers = Layers()
        for ids in (range(0, count, 2), range(1, count, 2)):
            for _ in range(4):
                layers.step(*ids)
        ids = layers.ids(range(count))
        mx.eval(layers.states.arrays(ids))
        layers.states.load(ids)
        graph = StringIO()
        mx.export_to_dot(graph, *[a for c in layers.caches for a in c.cache if a is not None])
        layers.step(*range(count))
        layers.check()
        return graph.getvalue().count("label")

    assert nodes(4) == nodes(16)


def test_rows_of_a_waiting_sequence_become_arrays_of_its_own(layers):
    for _ in range(4):
        layers.step(1, 2, 3, 4)
    layers.fork(3, 5)
    assert layers.separate(1, 2, 3, 4) == []
    assert layers.separate(1, 2) == [], "each row is a state that is kept"
    joined = layers.joined()
    layers.drop(4)
    own = layers.separate(1, 2)  # two layers of two arrays: 5 is as 3
    assert [array.shape[0] for array in own] == [1] * 4
    assert layers.joined() is joined and layers.separate(1, 2) == []
    layers.check()
    for _ in range(4):
        layers.step(4)
    layers.step(2, 4, 5, 1)
    layers.check()


def test_sequences_join(layers):
    for joining in ((1, 2), (3,), (4, 5)):
        for _ in range(4):  # until they have the same form
            layers.step(*joining)
    layers.step(1, 2, 3)
    layers.step(2, 4, 1, 5, 3, padding=3)
    layers.check()


def test_a_fork_goes_its_own_way(layers):
    layers.step(1, 2)
    layers.fork(2, 3)
    layers.step(1, 2, 3)
    layers.check()
    layers.drop(2)
    layers.step(3, 1)
    layers.check()


def test_a_dropped_sequence_starts_empty(layers):
    layers.step(1, 2)
    layers.drop(1)
    assert len(layers.states) == 1
    layers.step(1)
    layers.step(1)
    layers.step(2)
    layers.step(1, 2)
    layers.check()


def test_a_copy_is_what_it_was_and_can_be_continued(layers):
    for _ in range(4):
        layers.step(1, 2)
    kept, tokens = layers.copy(2), list(layers.expected[2])
    layers.step(1, 2)
    layers.restore(2, kept, tokens)
    layers.check()
    layers.step(1, 2)
    layers.check()
    layers.restore(3, kept, tokens)
    layers.check()


def test_only_states_of_the_same_form_are_alike(layers):
    def alike() -> set[int]:
        return layers.states.alike(layers.spans([1, 2, 3]))

    for _ in range(4):
        layers.step(1, 2)
    layers.step(3)
    assert alike() == {1, 2}
    assert layers.states.alike([]) == set()
    for _ in range(3):
        layers.step(3)
    assert alike() == {1, 2, 3}
    own = layers.copy(1)
    halves = [[None if a is None else a.astype(mx.float16) for a in layer] for layer in own]
    layers.restore(1, halves, layers.expected[1])
    assert alike() == {2, 3}
    assert layers.states.have(layers.spans([1]), forms_of(halves))
    assert not layers.states.have(layers.spans([2, 1]), forms_of(halves))


def test_values_of_padding_reach_no_sequence(layers):
    for _ in range(4):
        spans = layers.spans([1, 2])
        with layers.states.computing(spans, False, 2):
            layers._forward((1, 2), 2)
            for cache in layers.caches:
                cache.cache[:] = [
                    None if a is None else mx.concatenate([a[:2], mx.full(a[2:].shape, mx.nan)])
                    for a in cache.cache
                ]
        layers.newest |= {span.request.id: span.leaves[0].id for span in spans}
        layers.step(3)
    for rows, padding in (((1, 2), 2), ((1, 2, 3), 2), ((2, 1), 1), ((1,), 3), ((3, 1), 0)):
        layers.step(*rows, padding=padding)
    layers.check()


def test_random_courses(layers):
    rng, live = np.random.default_rng(0), []
    for number in range(300):
        kind = rng.integers(6)
        if kind == 0 or not live:
            live.append(number)
            for _ in range(4):
                layers.step(number)  # its states grow no more
        elif kind == 1:
            child = 1000 + number
            layers.fork(live[-1], child)
            live.append(child)
        elif kind == 2:
            layers.drop(live.pop(int(rng.integers(len(live)))))
        else:
            if rng.random() < 0.2:
                rng.shuffle(live)
            chosen = [seq_id for seq_id in live if rng.random() < 0.8]
            if chosen:
                layers.step(*chosen, padding=int(rng.integers(3)))
                if rng.random() < 0.3:
                    layers.separate(*chosen)
        if number % 20 == 0:
            layers.check()
    layers.check()
