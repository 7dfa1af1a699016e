"""Adapters come, change and go while requests run; K/V of one is never that of another."""

import gc
import sys
import threading
import weakref
from argparse import Namespace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, EngineService, SamplingParams, ops
from mlx_paged.adapters import store
from mlx_paged.metrics.stats import resident_bytes
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.runner import low_rank_stacks as stacks
from mlx_paged.server.served_adapters import ServedAdapters
from tests.support.models.adapters import greedy, random_arrays, with_adapter, write_adapter
from tests.support.models.architectures import VOCAB, build

PROMPT = [5, 9, 2, 41, 7, 8, 3, 60, 22, 1, 4, 11]
TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(top / name, random_arrays(build("llama"), seed, rank=rank), rank=rank)
        for seed, (name, rank) in enumerate({"a": 4, "b": 4, "c": 12, "d": 3}.items())
    }


@pytest.fixture(scope="module")
def alone(folders):
    """mlx-lm's tokens with one adapter."""

    models = {name: with_adapter(build("llama"), folders.get(name)) for name in (None, *folders)}

    @cache
    def tokens(name, prompt):
        return greedy(models[name], list(prompt), TOKENS)

    def of(name, prompt=PROMPT):
        return tokens(name, tuple(prompt))

    assert len({tuple(of(name)) for name in (None, *folders)}) == 5
    return of


def made(**options):
    return Engine(build("llama"), **({"block_size": 4, "num_blocks": 96, "adapters": {}} | options))


def tokens_of(engine, adapter, prompt=PROMPT, **options):
    return engine.generate([prompt], max_tokens=TOKENS, adapter=adapter, **options)[0].tokens


def test_adapters_never_share_blocks(folders, alone):
    engine = made(adapters=folders)
    for name in (None, "a", "b", None, "b"):
        done = engine.generate([PROMPT], max_tokens=TOKENS, adapter=name)[0]
        assert done.tokens == alone(name), name
    assert done.cached_prompt_tokens > 0
    engine.load_adapter("again", folders["b"])
    done = engine.generate([PROMPT], max_tokens=TOKENS, adapter="again")[0]
    assert done.cached_prompt_tokens > 0 and done.tokens == alone("b")


def test_a_request_pins_and_drops_the_text_of_its_adapter(folders):
    engine = made(adapters=folders)
    (kept,) = engine.generate([PROMPT], max_tokens=TOKENS, adapter="a", retain="pin")
    assert kept.pinned.tokens == len(PROMPT) + TOKENS - 1
    for name in (None, "b"):
        engine.generate([PROMPT], max_tokens=TOKENS, adapter=name)
    engine.generate([PROMPT], max_tokens=TOKENS, adapter="c", retain="drop")
    cached = {
        name: engine.generate([PROMPT], max_tokens=1, adapter=name)[0].cached_prompt_tokens
        for name in (None, "a", "b", "c")
    }
    assert cached["c"] == 0 and min(cached[None], cached["a"], cached["b"]) > 0


def test_rows_without_an_adapter_have_their_bits(folders):
    def logprobs(adapters):
        engine = made(adapters=folders)
        params = [SamplingParams(max_tokens=TOKENS, logprobs=VOCAB, adapter=a) for a in adapters]
        return engine.generate([PROMPT[i:] for i in range(len(params))], params)

    plain = Engine(build("llama"), block_size=4, num_blocks=96)
    expected = plain.generate([PROMPT[:], PROMPT[1:]], max_tokens=TOKENS, logprobs=VOCAB)
    mixed = logprobs([None, None, "a", "c", "b"])
    for ours, theirs in zip(mixed[:2], expected, strict=True):
        assert ours.tokens == theirs.tokens and ours.top_logprobs == theirs.top_logprobs


def test_a_request_keeps_its_version(folders, alone):
    engine = made()
    engine.load_adapter("x", folders["a"])
    first = engine.add_request(PROMPT, max_tokens=TOKENS, adapter="x")
    engine.step()
    before = engine.adapters["x"].version
    engine.load_adapter("x", folders["b"])
    second = engine.add_request(PROMPT, max_tokens=TOKENS, adapter="x")
    engine.step()
    engine.unload_adapter("x")
    with pytest.raises(ValueError, match="adapter is 'x': expected one of none"):
        engine.add_request(PROMPT, adapter="x")
    with pytest.raises(ValueError, match="name is 'x': expected one of none"):
        engine.unload_adapter("x")
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert [done[i].tokens for i in (first, second)] == [alone("a"), alone("b")]
    assert done[first].adapter_version == before != done[second].adapter_version
    engine.settle()
    gc.collect()
    assert not engine._models.adapters._alive


def test_adapters_are_evicted_by_use_and_read_again(folders, alone):
    one = made(adapters=folders)._models.adapters
    size = max(adapter.num_bytes for adapter in one.named.values())
    engine = made(adapters=folders, adapter_memory=2 * size)
    own = engine._models.adapters
    for name in ("a", "b", "c", "d", "a", "c", "b"):
        assert tokens_of(engine, name) == alone(name)
        assert own.num_bytes <= 2 * size
    assert own.loads > 4
    names = [*folders, None, *folders]
    params = [SamplingParams(max_tokens=TOKENS, adapter=name) for name in names]
    done = engine.generate([PROMPT] * len(names), params)  # more than the budget, in one step
    assert [each.tokens for each in done] == [alone(name) for name in names]
    with pytest.raises(ValueError, match="expected at most adapter_memory"):
        made(adapters={"a": folders["a"]}, adapter_memory=1000)


def test_forwards_of_one_step_keep_what_each_other_adds(tmp_path):
    """Steps of this model have a forward for each sequence, and the budget has one adapter."""
    first, second = (
        write_adapter(tmp_path / name, random_arrays(build("gemma2"), seed))
        for seed, name in enumerate("ab")
    )
    folders = {"a": first, "b": second}
    one = Engine(build("gemma2"), block_size=4, num_blocks=96, adapters=folders)
    size = max(adapter.num_bytes for adapter in one.adapters.values())
    options = {"block_size": 4, "num_blocks": 96, "adapters": folders, "adapter_memory": size}
    engine = Engine(build("gemma2"), **options)
    params = [SamplingParams(max_tokens=TOKENS, adapter=name) for name in folders]
    done = engine.generate([PROMPT] * 2, params)
    for each, folder in zip(done, folders.values(), strict=True):
        assert each.tokens == greedy(with_adapter(build("gemma2"), folder), PROMPT, TOKENS)
    assert engine._models.adapters.loads == 2


def test_a_folder_that_changes_ends_only_its_requests(folders, alone, tmp_path):
    arrays = random_arrays(build("llama"), 0)
    engine = made()
    engine.load_adapter("x", write_adapter(tmp_path / "x", arrays))
    engine.load_adapter("a", folders["a"])
    write_adapter(tmp_path / "x", {k: 2 * v for k, v in arrays.items()})
    params = [SamplingParams(max_tokens=TOKENS, adapter=name) for name in ("x", "a", None)]
    done = engine.generate([PROMPT] * 3, params)
    assert "has changed" in done[0].error
    assert [each.tokens for each in done[1:]] == [alone("a"), alone(None)]
    engine.manager.check_integrity()


def test_a_folder_is_read_once_and_beside_the_engines_thread(folders, alone, monkeypatch):
    threads, read = [], store.read_adapter

    def recorded(*args):
        threads.append(threading.current_thread())
        return read(*args)

    monkeypatch.setattr(store, "read_adapter", recorded)
    engine = made()
    served = ServedAdapters(Namespace(adapters_dir=str(folders["a"].parent), adapters=None))
    with EngineService(engine) as service:
        assert served.use(service, "a") == "a"
        params = SamplingParams(max_tokens=TOKENS, adapter="a")
        assert service.submit(PROMPT, params).result().tokens == alone("a")
    assert threads == [threading.current_thread()]


def test_evicted_adapters_are_read_beside_the_engines_thread(folders, alone, monkeypatch):
    engine = made(adapters=folders)
    size = max(adapter.num_bytes for adapter in engine.adapters.values())
    engine, threads, read = made(adapters=folders, adapter_memory=size), [], store.read_adapter

    def recorded(*args):
        threads.append(threading.current_thread())
        return read(*args)

    monkeypatch.setattr(store, "read_adapter", recorded)
    names = ["a", "c", "a", "b", "b", "c"]
    with EngineService(engine) as service:
        for name in names:
            params = SamplingParams(max_tokens=TOKENS, adapter=name)
            assert service.submit(PROMPT, params).result().tokens == alone(name)
        served = ServedAdapters(Namespace(adapters_dir=None, adapters=dict(folders)))
        assert served.use(service, "a") == "a"
        ticket = service.adopt(lambda e: [e.add_request(PROMPT, max_tokens=TOKENS, adapter="a")])
        assert ticket[0].result().tokens == alone("a")
    assert len(threads) == 6 and set(threads) == {threading.current_thread()}


def test_a_changed_folder_is_told_when_a_request_comes(folders, alone, tmp_path):
    arrays = random_arrays(build("llama"), 0)
    engine = made(adapters={"x": write_adapter(tmp_path / "x", arrays), "a": folders["a"]})
    write_adapter(tmp_path / "x", {k: 2 * v for k, v in arrays.items()})
    with EngineService(engine) as service:
        with pytest.raises(ValueError, match=r"adapter x in .* has changed"):
            service.submit(PROMPT, SamplingParams(max_tokens=TOKENS, adapter="x"))
        served = ServedAdapters(Namespace(adapters_dir=None, adapters={"x": tmp_path / "x"}))
        with pytest.raises(Refusal, match="the files of 'x' have changed") as refused:
            served.use(service, "x")
        assert str(tmp_path) not in str(refused.value)
        params = SamplingParams(max_tokens=TOKENS, adapter="a")
        assert service.submit(PROMPT, params).result().tokens == alone("a")


def test_more_adapters_leave_the_stacks_where_they_are(folders, alone):
    """Else graphs are traced again and factors copied. Where no address space can be reserved, the
    arrays grow."""
    engine = made(adapters=folders)
    found = engine._models.adapters
    arrays = []
    for name in ("a", "b", "d"):
        assert tokens_of(engine, name) == alone(name)
        (held,) = found._stacks.values()
        arrays.append([id(each) for pair in held.pairs.values() for each in pair])
        assert held.num_slots == len(arrays) or not held.are_reserved
    assert held.are_reserved == (sys.platform == "linux" and mx.default_device() == mx.cpu)
    assert arrays[0] == arrays[1] == arrays[2] or not held.are_reserved


@pytest.mark.parametrize("reserves", [True, False])
def test_stacks_keep_factors_while_they_grow(folders, reserves, monkeypatch):
    """With address space of 3 slots, and on a device that reserves none."""
    if not reserves:
        monkeypatch.setattr(stacks, "_reserves", lambda: False)
    own = made(adapters=folders)._models.adapters
    places, read = own.layers.places, {name: own.read(name, folders[name]) for name in folders}
    grown, names = stacks.RankStacks(16, places, 3), list("abcdabcd")
    for number, name in enumerate(names):
        if grown.free_slot() is None:
            grown.grow(10)
        grown.put(number, grown.free_slot(), read[name].factors)
    names.append("a")  # in the place of a larger rank, and without one layer
    *_, last = fewer = dict(read["a"].factors)
    del fewer[last]
    grown.put(8, grown.slots.pop(2), fewer)
    assert not grown.are_reserved and 8 <= grown.num_slots <= 10
    for number, name in enumerate(names):
        for path, pair in read[name].factors.items():
            if number == 2:
                continue
            if number == 8 and path == last:
                assert not any(stack[grown.slots[8]].any() for stack in grown.pairs[path])
                continue
            for stack, factor in zip(grown.pairs[path], pair, strict=True):
                row = np.zeros(stack.shape[1:], np.float32)
                row[: factor.shape[0]] = factor
                assert np.array_equal(stack[grown.slots[number]], row), (number, path)


def test_the_ledger_counts_what_was_read(folders):
    engine, size = made(), 0

    def lines():
        return {h.name: h.num_bytes for h in engine.ledger.lines() if h.name.startswith("adapters")}

    for name in "ab":
        size = engine.load_adapter(name, folders[name]).num_bytes // 2  # of rank 4 in class 8
    assert lines() == {"adapters": 0, "adapters_waiting": size}
    engine.prepare_adapter("a")
    assert lines() == {"adapters": 0, "adapters_waiting": 2 * size}
    tokens_of(engine, "a")
    held = engine._models.adapters._stacks[8]
    assert lines() == {"adapters": held.num_slots * 2 * size, "adapters_waiting": size}
    for name in "ab":
        engine.unload_adapter(name)
    gc.collect()
    engine.settle()
    engine.load_adapter("c", folders["c"])
    engine.unload_adapter("c")
    assert lines() == {"adapters": 0, "adapters_waiting": 0}


def test_an_unload_within_a_load_waits_for_it(folders):
    """Else the server would list a name that the engine no longer has."""
    engine, unloads = made(), []
    args = Namespace(adapters_dir=str(folders["a"].parent), adapters=None)
    served = ServedAdapters(args)

    class Interrupted:
        def call(self, function):
            result = service.call(function)
            if "x" in args.adapters and not unloads:  # the second load
                unload = threading.Thread(
                    target=served.unload_named, args=(service, {"lora_name": "x"})
                )
                unloads.append(unload)
                unload.start()
                unload.join(0.2)
            return result

    body = {"lora_name": "x", "lora_path": "a", "load_inplace": True}
    with EngineService(engine) as service:
        for _ in range(2):
            served.load_named(Interrupted(), body, [])
        unloads[0].join()
    assert args.adapters.keys() == engine.adapters.keys() == set()


def test_forks_and_beams_inherit(folders, alone):
    engine = made(adapters=folders)
    parent = engine.add_request(PROMPT, max_tokens=4, adapter="a", keep=True)
    while engine.has_work:
        engine.step()
    child = engine.fork(parent, [3, 4], max_tokens=TOKENS)
    with pytest.raises(ValueError, match="adapter is 'b': expected None, or that"):
        engine.fork(parent, max_tokens=3, adapter="b")
    while engine.has_work:
        found = [o.completion for o in engine.step() if o.completion]
    prompt = PROMPT + alone("a")[:4] + [3, 4]
    assert found[-1].request_id == child and found[-1].tokens == alone("a", prompt)
    best = engine.beam_search(PROMPT, 1, max_tokens=TOKENS, adapter="c")
    assert best.tokens == alone("c")
    assert [c.tokens for c in engine.sample([PROMPT], 2, max_tokens=4, adapter="b", temperature=0.1,
            top_k=1)[0]] == [alone("b")[:4]] * 2  # fmt: skip


@pytest.mark.parametrize("options", [{"speculate": "ngram"}, {"draft_model": "llama"}])
def test_drafts_stay_exact(folders, alone, options):
    if "draft_model" in options:
        options = {"draft_model": build("llama", seed=1)}
    engine = made(adapters=folders, **options)
    prompt = PROMPT * 3
    params = [SamplingParams(max_tokens=TOKENS, adapter=name) for name in ("a", None, "c")]
    done = engine.generate([prompt] * 3, params)
    assert [each.tokens for each in done] == [alone(n, prompt) for n in ("a", None, "c")]


def test_updates_change_new_requests(folders):
    engine, model = made(), build("llama")
    arrays = random_arrays(model, 5)
    expected = []
    for factor in (1.0, 2.0):
        now = {name: factor * each for name, each in arrays.items()}
        model.load_weights(list(now.items()), strict=False)
        version = engine.update_adapter("p", now, scale=4.0 if factor == 1 else None).version
        expected.append(greedy(model, PROMPT, TOKENS))
        done = engine.generate([PROMPT], max_tokens=TOKENS, adapter="p")[0]
        assert done.tokens == expected[-1] and done.adapter_version == version
        assert done.cached_prompt_tokens == 0
    assert expected[0] != expected[1]
    running = engine.add_request(PROMPT, max_tokens=50, adapter="p")
    other = engine.add_request(PROMPT, max_tokens=TOKENS)
    engine.step()
    engine.update_adapter("p", arrays, end_requests=True)
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert done[running].finish_reason == "abort" and len(done[running].tokens) < 50
    assert done[other].tokens == greedy(build("llama"), PROMPT, TOKENS)
    with pytest.raises(ValueError, match="scale is None: expected the scale of a new adapter"):
        engine.update_adapter("q", arrays)
    with pytest.raises(ValueError, match="no linear layer"):
        engine.update_adapter("p", arrays | {"x.lora_a": mx.zeros((2, 2))})
    with pytest.raises(ValueError, match="scale is nan"):
        engine.update_adapter("p", arrays, scale=float("nan"))
    with pytest.raises(ValueError, match="scale is 1000"):
        engine.update_adapter("p", arrays, scale=10**400)


def held_memory(engine):
    """What adapters may leave in the process."""
    gc.collect()
    own = engine._models.adapters
    counts = {"named": len(own.named), "alive": len(own._alive), "read": len(own._waiting)}
    counts |= {"stacks": len(own._stacks), "reserved": ops.reserved_bytes()}
    counts["objects"] = sum(isinstance(each, store.Adapter) for each in gc.get_objects())
    return counts | {"finalizers": len(weakref.finalize._registry), "mlx": mx.get_active_memory()}


def check_that_nothing_is_left(folders, loads):
    """Pages grow by less than 1 KB a load: an adapter has 17 KB and more."""
    engine = made(adapter_memory=200_000)

    def run(count):
        for i in range(count):
            name, folder = f"n{i % 7}", "abcd"[i % 4]
            engine.load_adapter(name, folders[folder])
            if i % 5 == 0:
                engine.generate([[1, 2, 3, i % 50]], max_tokens=2, adapter=name)
            if i % 2:
                engine.unload_adapter(name)
        for name in engine.adapters:
            engine.unload_adapter(name)
        engine.settle()
        engine.forget()
        return held_memory(engine)

    first = run(40)
    pages = resident_bytes()
    assert run(loads) == first
    assert first["named"] == first["alive"] == first["read"] == first["stacks"] == 0
    assert resident_bytes() - pages < max(loads, 4000) * 1000
    engine.manager.check_integrity()


def test_loads_and_unloads_leave_nothing(folders):
    check_that_nothing_is_left(folders, 150)


@pytest.mark.slow
def test_ten_thousand_loads_leave_nothing(folders):
    check_that_nothing_is_left(folders, 10_000)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(120))
def test_random_adapters_loads_and_unloads(seed, folders, alone):
    """Every completion has the tokens of the version that it names; nothing leaks."""
    rng = np.random.default_rng(seed)
    sizes = [adapter.num_bytes for adapter in made(adapters=folders).adapters.values()]
    options = {"adapter_memory": int(rng.integers(max(sizes), 3 * max(sizes)))}
    options |= {"num_blocks": int(rng.integers(24, 60)), "compile": bool(seed % 2)}
    options |= {"max_running": int(rng.integers(1, 7)), "prefill_chunk": int(rng.integers(3, 20))}
    engine = made(**options)
    asked, done, content = {}, {}, {}
    for _ in range(60):
        call = rng.integers(6)
        name, folder = f"n{rng.integers(3)}", rng.choice(list(folders))
        if call == 0:
            content[name] = folder
            engine.load_adapter(name, folders[folder])
        elif call == 1 and name in content:
            engine.unload_adapter(name)
            del content[name]
        elif call == 2 or not engine.has_work:
            adapter = name if name in content else None
            start = int(rng.integers(len(PROMPT) - 2))
            request = engine.add_request(PROMPT[start:], max_tokens=TOKENS, adapter=adapter)
            asked[request] = content.get(adapter), start
        elif call == 3 and asked:
            engine.abort(int(rng.choice(list(asked))))
        else:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    for request, completion in done.items():
        folder, start = asked[request]
        assert completion.error is None
        assert completion.tokens == alone(folder, PROMPT[start:])
    engine.manager.check_integrity()
    for name in content:
        engine.unload_adapter(name)
    engine.settle()
    gc.collect()
    assert not engine._models.adapters._alive
    assert engine.manager.blocks_in_use == 0
