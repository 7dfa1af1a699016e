"""The bench of retention: its traces, what it counts, and the bound."""

import json
import random
from itertools import combinations

import pytest

from bench.retention import __main__ as bench
from bench.retention.bound import _block_numbers, bound_with_places, clairvoyant_bound
from bench.retention.lru import LeastRecentlyUsed
from bench.retention.traces import TRACES, Ask, Trace, chat
from bench.retention.works import WORKS
from mlx_paged.kv.eviction import WorthOrder


def small(prompts, pool_blocks=100, **options):
    """A trace of prompts of whole pieces; each has an answer of one token, which is in no pool."""
    pieces = [tuple((number, 32) for number in prompt) for prompt in prompts]
    answers = [(1000 + i, 1) for i in range(len(prompts))]
    asks = [
        Ask(100 * i, "a", *text, **options)
        for i, text in enumerate(zip(pieces, answers, strict=True))
    ]
    return Trace("a", pool_blocks, asks)


def test_a_trace_is_always_the_same():
    first, second = (chat(1, turns=3)() for _ in range(2))
    assert first == second and len(first.asks) > 40
    assert [ask.at for ask in first.asks] == sorted(ask.at for ask in first.asks)
    alone = TRACES["chat alone"]()
    turns = [
        [length for _, length in ask.prompt]
        for ask in TRACES["chat beside 1x"]().asks
        if ask.who == "chat"
    ]
    assert [[length for _, length in ask.prompt] for ask in alone.asks] == turns


def test_tokens_that_are_computed_again_are_counted():
    """A pool of 4 blocks: a text of 4 blocks goes where the next one comes."""
    trace = small([[1, 2], [3, 4], [1, 2]], pool_blocks=4)
    counts = bench.replayed(trace, LeastRecentlyUsed)
    assert counts.prompts["a"] == counts.computed["a"] == 3 * 64
    assert counts.again["a"] == 64 and counts.first == [64, 64, 64]
    counts = bench.replayed(small([[1, 2], [3, 4], [1, 2]]), LeastRecentlyUsed)
    assert counts.again["a"] == 1  # the last prompt token is computed for its logits
    assert counts.first == [64, 64, 1]


def test_other_salts_know_nothing():
    trace = small([[1, 2], [1, 2]])
    trace.asks[1] = Ask(100, "a", trace.asks[1].prompt, trace.asks[1].answer, "b")
    counts = bench.replayed(trace, WorthOrder)
    assert counts.again["a"] == 0 and counts.first == [64, 64]


@pytest.mark.parametrize(
    ("prompts", "blocks", "again"),
    [
        ([[1, 2], [3, 4], [1, 2]], 8, 0),
        ([[1, 2], [3, 4], [1, 2]], 4, 0),  # a block may be used without a place
        ([[1, 2], [3, 4], [1, 2], [3, 4]], 5, 3 * 16),
        ([[1], [2], [3], [1], [2], [3]], 2, 32 * 2),
        ([[1], [2], [3], [1], [2], [3]], 4, 32),
    ],
)
def test_the_bound_of_small_traces(prompts, blocks, again):
    assert clairvoyant_bound(small(prompts, blocks)) == again


def test_no_order_beats_the_bounds():
    trace = small([[i % 7, i % 5 + 10, i % 3 + 20] for i in range(60)], 24)
    bound, with_places = clairvoyant_bound(trace), bound_with_places(trace)
    assert with_places > bound > 0
    for order in bench.ORDERS.values():
        assert bench.replayed(trace, order).again.total() >= with_places


@pytest.mark.parametrize(
    ("prompts", "blocks", "again"),
    [
        ([[1, 2], [3, 4], [1, 2]], 8, 0),
        ([[1, 2], [3, 4], [1, 2]], 4, 4 * 16),  # all blocks of the second text need a place
        ([[1, 2], [3, 4], [1, 2]], 6, 2 * 16),
        ([[1, 2], [1, 3], [1, 2]], 4, 2 * 16),  # what both texts begin with stays
    ],
)
def test_the_bound_with_places_of_small_traces(prompts, blocks, again):
    assert bound_with_places(small(prompts, blocks)) == again


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_with_places_is_that_of_a_search(seed):
    """All choices of what stays, from their ends on, against the bound."""
    rng = random.Random(seed)
    trace = small([[rng.randrange(3), rng.randrange(3)] for _ in range(6)], 6)
    texts = _block_numbers(trace.asks)

    def least(i, kept, seen):
        if i == len(texts):
            return 0
        blocks = set(texts[i])
        now = len(blocks & seen - kept)
        others = sorted(kept - blocks)
        room = min(len(others), trace.pool_blocks - len(blocks))
        rests = [blocks | set(some) for some in combinations(others, room)]
        return now + min(least(i + 1, rest, seen | blocks) for rest in rests)

    assert bound_with_places(trace) == 16 * least(0, set(), set())


def test_a_chat_survives_sweeps():
    row = bench.measure(chat(2, turns=4)())
    assert row["ours"]["watched_again"] < 0.2 < 0.4 < row["lru"]["watched_again"]
    assert row["ours"]["over_bound"] < row["lru"]["over_bound"]


def test_the_last_line_is_json(capsys, monkeypatch):
    monkeypatch.setitem(TRACES, "chat beside 1x", chat(1, turns=2))
    bench.main(["--traces", "chat beside 1x"])
    head, line, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)["traces"]["chat beside 1x"]
    assert (
        head.startswith("trace")
        and head.count("operations again") == 1
        and line.startswith("chat beside 1x")
    )
    counts = {"bound", "with_places", "best_over_bound", "prompt_tokens"}
    assert set(result) == counts | {"lru", "ours"}


def test_another_seed_is_another_trace():
    for name in ("agents", "tenants", "crowd"):
        assert TRACES[name](1) == TRACES[name](1) != TRACES[name](0) == TRACES[name]()


def test_operations_of_what_is_computed_again_are_those_of_the_model():
    """The last prompt token alone, after 63 others."""
    work = WORKS["SmolLM2-135M"]
    counts = bench.replayed(small([[1, 2], [3, 4], [1, 2]]), WorthOrder, work)
    assert counts.operations == 30 * 2 * (2 * 576**2 + 2 * 576 * 192 + 3 * 576 * 1536) + 64 * (
        30 * 9 * 64 * 4
    )


def test_an_unknown_trace_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--traces", "nothing"])
    assert "nothing" in capsys.readouterr().err
