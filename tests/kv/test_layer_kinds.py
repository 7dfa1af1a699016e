"""A kind of layer is one class: the block tables, the prefix cache and the scheduler follow it."""

import random
from dataclasses import dataclass

import pytest

from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.layer_kinds import FULL, LayerKind, Window
from mlx_paged.kv.state_kind import EMPTY, Move, NoStates, State
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler
from tests.support.simulation.fake_model import FakeClock, FakeRunner
from tests.support.simulation.hash_model import VOCAB

BLOCK, CHUNK = 4, 8


@dataclass(frozen=True)
class Sections:
    """A query sees the tokens of its own section of `size` tokens, as in Llama 4. The toy of this
    test: no file of the package knows it."""

    size: int

    keeps_all = False

    def kept_from(self, position: int) -> int:
        return max(0, position - 1) // self.size * self.size

    def reach(self, position: int, num_tokens: int, chunk: int) -> int:
        return min(num_tokens, position + chunk)

    def most_tokens(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(num_tokens, self.size + chunk + 2 * block_size)


class Numbered(NoStates):
    """States of which a step leaves one, at most `stride` tokens after the one before. The toy of
    this test: no file of the package knows it."""

    stride = 6

    def begin(self, match):
        return [EMPTY]

    def chunk_stop(self, start, stop, num_tokens):
        return min(stop, start - start % self.stride + self.stride)

    def advance(self, held, start, stop, is_sure, text):
        read = held.pop()
        self.released += [read.id] * (read.id > 0)
        held.append(State(read.id + 1, stop))
        return Move(read, (held[0],))


KINDS = [FULL, Window(10), Sections(12)]


def first_seen(kind: LayerKind, position: int) -> int:
    """The first token that a query at `position` sees, by the definition of the kind."""
    if isinstance(kind, Window):
        return max(0, position - kind.size + 1)
    return position - position % kind.size if isinstance(kind, Sections) else 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_kind_keeps_what_its_queries_see(kind):
    """Those of the next token, and of the token before it, which may be computed again."""
    for position in range(1, 60):
        assert kind.kept_from(position) <= first_seen(kind, position - 1)
        assert kind.kept_from(position) <= kind.kept_from(position + 1)
        assert kind.keeps_all == (kind.kept_from(10**6) == 0)
        assert kind.reach(position, 500, CHUNK) >= min(500, position + CHUNK)
        held = position + CHUNK - kind.kept_from(position)
        assert held <= kind.most_tokens(position + CHUNK, CHUNK, BLOCK)


def test_a_kind_of_states_says_where_spans_end_and_what_they_leave():
    scheduler = Scheduler(BlockAllocator(20, BLOCK, states=Numbered()), 4, CHUNK)
    request = Request(0, list(range(15)), SamplingParams(max_tokens=1), seed=0)
    scheduler.add(request)
    steps = [scheduler.schedule() for _ in range(3)]
    spans = [step.spans[0] for step in steps]
    assert [(span.start, span.stop) for span in spans] == [(0, 6), (6, 12), (12, 15)]
    assert [span.reads for span in spans] == [0, 1, 2]
    assert [span.leaves for span in spans] == [((1, 6),), ((2, 12),), ((3, 15),)]
    assert [step.released for step in steps] == [[], [1], [2]]


def engine_with(groups: tuple[LayerGroup, ...], num_blocks: int) -> EngineCore:
    allocator = BlockAllocator(num_blocks, BLOCK, groups, CHUNK)
    clock = FakeClock()
    return EngineCore(
        Scheduler(allocator, 4, CHUNK, clock=clock),
        FakeRunner(allocator, clock, random.Random(0), recurrent=False),
        EngineStats(BLOCK, 1, num_blocks),
        vocab_size=VOCAB,
        seed=0,
    )


def course(engine: EngineCore) -> list[list[int]]:
    """The tokens of prompts with common beginnings, and of a fork of one of them in each wave."""
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(45)]
    done = {}
    for wave in range(4):
        prompts = [[*stem[: rng.randrange(1, 45)], wave, i] for i in range(5)]
        ids = [engine.add_request(prompt, max_tokens=30, keep=True) for prompt in prompts]
        for has_fork in (False, True):
            if has_fork:
                engine.fork(ids[-1], [7], max_tokens=9)
            while engine.has_work:
                done |= {o.request_id: o.completion for o in engine.step() if o.completion}
                engine.scheduler.allocator.check_integrity()
        for request_id in ids:
            engine.release(request_id)
    return [completion.tokens for _, completion in sorted(done.items())]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_an_engine_follows_a_kind(kind):
    """The runner notes a violation if a token that a query sees is not in the kind's blocks."""
    expected = course(engine_with((LayerGroup(),), 400))
    for num_blocks in (400, 44):
        engine = engine_with((LayerGroup(), LayerGroup(custom=kind)), num_blocks)
        assert course(engine) == expected
        assert engine.runner.pool.violations == []
        assert engine.scheduler.allocator.prefix_hit_tokens > 0
        assert num_blocks == 400 or engine.scheduler.num_preemptions > 0


def test_a_section_frees_the_blocks_of_the_one_before():
    allocator = BlockAllocator(100, BLOCK, (LayerGroup(custom=Sections(12)),), CHUNK)
    allocator.admit(1, 0)
    most = 0
    for position in range(50):
        allocator.make_writable(1, position, position + 1)
        allocator.trim(1, position + 1)
        most = max(most, allocator.store.blocks_in_use)
    assert most == 12 // BLOCK
    assert most <= allocator.max_blocks(50)
