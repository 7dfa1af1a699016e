"""Adapters on a GPU: its products, its stacks that grow, and slots that a step under way reads. The
CPU computes what is chosen for a GPU."""

from functools import partial

import mlx.core as mx
import pytest

from bench.host_cost.gpu_answers import gpu_answers
from mlx_paged import Engine, SamplingParams
from mlx_paged.ops import dispatch
from mlx_paged.runner import low_rank_stacks as stacks
from tests.support.models.adapters import greedy, random_arrays, with_adapter, write_adapter
from tests.support.models.architectures import build

PROMPT = [5, 9, 2, 41, 7, 8, 3, 60, 22, 1, 4, 11]
TOKENS = 8
RANKS = {"a": 4, "b": 4, "c": 12, "d": 3}
SIZES = {"block_size": 16, "num_blocks": 96, "prewarm": False}


def folders_in(top, name):
    return {
        each: write_adapter(top / each, random_arrays(build(name), seed, rank=rank), rank=rank)
        for seed, (each, rank) in enumerate(RANKS.items())
    }


def answers(name, folders):
    """mlx-lm's tokens without an adapter and with each one."""
    found = {
        each: greedy(with_adapter(build(name), folders.get(each)), PROMPT, TOKENS)
        for each in (None, *folders)
    }
    assert len({*map(tuple, found.values())}) == len(found)
    return found


@pytest.fixture
def answers_of_a_gpu(monkeypatch):
    """Python runs as on a GPU, whose arrays reserve no address space."""
    monkeypatch.setattr(stacks, "_reserves", lambda: False)
    dispatch.forget()
    yield gpu_answers
    dispatch.forget()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_products_of_a_gpu_give_the_tokens_of_mlx_lm(
    answers_of_a_gpu, tmp_path, monkeypatch, name, is_compiled
):
    folders = folders_in(tmp_path, name)
    alone, calls, product = answers(name, folders), list[int](), mx.gather_mm
    monkeypatch.setattr(mx, "gather_mm", lambda *a, **o: [product(*a, **o), calls.append(1)][0])
    with answers_of_a_gpu():
        engine = Engine(build(name), **SIZES, adapters=folders, compile=is_compiled)
        assert (engine.runner.compiled is not None) == is_compiled
        params = [SamplingParams(max_tokens=TOKENS, adapter=each) for each in alone]
        together = engine.generate([PROMPT] * len(alone), params)
        assert [each.tokens for each in together] == [*alone.values()] and calls
        for each, tokens in alone.items():  # of other rows, and with stacks that have grown
            (done,) = engine.generate([PROMPT], max_tokens=TOKENS, adapter=each)
            assert done.tokens == tokens, each
    assert not any(held.are_reserved for held in engine._models.adapters._stacks.values())


def test_a_layer_that_compiles_itself_keeps_no_terms(tmp_path, monkeypatch):
    """On a Mac kimi_k3's layers compile their decodes of each number of rows."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(stacks, "_reserves", lambda: False)
    folders = folders_in(tmp_path, "kimi_k3")
    alone = answers("kimi_k3", folders)
    model = build("kimi_k3")
    plain = Engine(model, **SIZES)
    assert plain.generate([PROMPT], max_tokens=TOKENS)[0].tokens == alone[None]
    assert any(getattr(module, "_step", None) is not None for module in model.modules())
    engine = Engine(model, **SIZES, adapters=folders)
    for each in ("a", "b", None, "c"):
        (done,) = engine.generate([PROMPT], max_tokens=TOKENS, adapter=each)
        assert done.tokens == alone[each], each


@pytest.mark.parametrize("reserves", [False, True])
def test_a_slot_is_written_when_nothing_under_way_reads_it(tmp_path, monkeypatch, reserves):
    """A GPU would read the slot of a step under way while the host writes there."""
    if not reserves:
        monkeypatch.setattr(stacks, "_reserves", lambda: False)
    folders = folders_in(tmp_path, "llama")
    alone, events = answers("llama", folders), list[str]()
    writes = list[tuple[str, int]]()  # after what, and the steps under way
    engine = Engine(build("llama"), **SIZES, adapters=folders)  # tells the adapters' sizes
    size = max(each.num_bytes for each in engine._models.adapters.named.values())
    engine = Engine(build("llama"), **SIZES, adapters=folders, adapter_memory=2 * size)
    under_way = set[int]()

    def noting(event, function, *args, **options):
        events.append(event)
        return function(*args, **options)

    def launch(step, before, launch=engine.runner.launch):
        launched = launch(step, before)
        under_way.add(id(launched))
        return launched

    def collect(launched, collect=engine.runner.collect):
        tokens = collect(launched)
        under_way.discard(id(launched))
        return tokens

    def write(*args, write=stacks.write_slot):
        writes.append((events[-1], len(under_way)))
        write(*args)

    monkeypatch.setattr(engine.runner, "launch", launch)
    monkeypatch.setattr(engine.runner, "collect", collect)
    monkeypatch.setattr(mx, "async_eval", partial(noting, "begin", mx.async_eval))
    monkeypatch.setattr(mx, "synchronize", partial(noting, "wait", mx.synchronize))
    monkeypatch.setattr(stacks, "write_slot", write)
    done, names = dict[int, list[int]](), dict[int, str]()
    for each in [*folders, *folders]:  # each comes while the one before has not ended
        names[engine.add_request(PROMPT, max_tokens=TOKENS, adapter=each)] = each
        for _ in range(TOKENS - 2):
            done |= {o.request_id: o.completion.tokens for o in engine.step() if o.completion}
    while engine.has_work:
        done |= {o.request_id: o.completion.tokens for o in engine.step() if o.completion}
    assert set(writes) == {("wait", 0), ("wait", 1)} and len(writes) > len(folders)
    assert {names[i]: tokens for i, tokens in done.items()} == {n: alone[n] for n in folders}
    assert len(done) == len(names)
