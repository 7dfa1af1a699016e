"""An engine with a disk: the same tokens, fewer computed."""

import threading
import time
from itertools import count
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.kv.block_bytes import Staging
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv_disk import tier
from mlx_paged.kv_disk.packs import _check_thread
from tests.support import TIMEOUT
from tests.support.engine.disk_engines import GREEDY, SIZE, make_engine, outputs, tokens_of
from tests.support.models import tiny_models


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt_oss", "gemma3_text", "deepseek_v3", "jamba", "mamba2"],
)
def test_a_new_engine_finds_what_the_last_one_computed(model_type, tmp_path):
    model = tiny_models.tiny_model(model_type)
    prompts = [tokens_of(seed) for seed in range(3)]
    expected, _, nothing = outputs(model, prompts)
    assert nothing is None
    before = outputs(model, prompts, tmp_path)
    assert before[0] == expected and before[1] == [0, 0, 0]
    after = outputs(model, prompts, tmp_path)
    assert after[0] == expected
    assert after[1] == [48, 48, 48], "the full blocks before the last token"
    assert after[2]["hits"] > 0 and after[2]["bytes_written"] == 0 and not after[2]["dropped"]
    longer = [prompt + tokens_of(9, 30) for prompt in prompts]
    assert outputs(model, longer, tmp_path)[0] == outputs(model, longer)[0]


@pytest.mark.parametrize("kv_bits", [8, 6, 4])
def test_quantized_blocks_come_back_for_the_same_bits_only(kv_bits, tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(0)]
    expected = outputs(model, prompts, kv_bits=kv_bits)[0]
    assert outputs(model, prompts, tmp_path)[1] == [0]
    for cached in (0, 48):
        found = outputs(model, prompts, tmp_path, kv_bits=kv_bits)
        assert found[:2] == (expected, [cached])


@pytest.mark.slow
def test_what_preempted_requests_lost_comes_back_from_the_disk(tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(seed, 20) for seed in range(6)]
    found = []
    for directory in (None, tmp_path):
        engine = make_engine(model, directory, num_blocks=40)
        if directory is not None:
            engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
        found.append([c.tokens for c in engine.generate(prompts, max_tokens=60)])
        assert engine.scheduler.num_preemptions > 3
        metrics = engine.metrics()["kv_disk"]
        engine.close()
    assert found[0] == found[1]
    assert metrics["hits"] > 0, "nothing was read although no prompt was known before"


def test_what_has_to_be_computed_is_not_read(tmp_path):
    """Prompt tokens whose log-probabilities are wanted."""
    model, prompt = tiny_models.tiny_model("llama"), tokens_of(0)
    outputs(model, [prompt], tmp_path)
    for first, hits in ((0, 0), (25, 6), (0, 0)):
        engine = make_engine(model, tmp_path)
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
        wanted = {"prompt_logprobs": 0, "prompt_logprobs_from": first}
        (done,) = engine.generate([prompt], max_tokens=1, **wanted)
        assert engine.metrics()["kv_disk"]["hits"] == hits
        assert done.cached_prompt_tokens == hits * SIZE
        assert all(done.prompt_logprobs[max(1, first) :])
        engine.close()


def test_copies_in_which_a_gpu_fails_are_not_written(tmp_path, monkeypatch):
    """MLX may show such a copy as done before it knows of the error."""
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(0), tokens_of(1)]
    expected = outputs(model, prompts)[0]
    fails = False

    def wait():
        if fails:
            raise RuntimeError("[METAL] Command buffer execution failed: planted.")

    monkeypatch.setattr(ops.metal, "end_of_work", lambda: wait)
    engine = make_engine(model, tmp_path)
    assert [c.tokens for c in engine.generate(prompts, **GREEDY)] == expected
    fails, stored = True, engine.metrics()["kv_disk"]["records"]
    assert not engine.copy_when_idle()
    fails = False
    assert engine.metrics()["kv_disk"]["records"] == stored
    assert [c.tokens for c in engine.generate(prompts, **GREEDY)] == expected
    engine.manager.check_integrity()
    engine.close()
    after = outputs(model, prompts, tmp_path)
    assert after[:2] == (expected, [48, 48])


@pytest.mark.slow
def test_streams_run_while_a_prompt_waits_for_the_disk(tmp_path):
    model = tiny_models.tiny_model("llama")
    (expected,), *_ = outputs(model, [tokens_of(0)], tmp_path)
    engine = make_engine(model, tmp_path)
    store, gate = engine.scheduler.tier.store, threading.Event()
    read = store._packs.read

    def slow_read(*args):
        _check_thread()
        gate.wait()
        return read(*args)

    with mock.patch.object(store._packs, "read", slow_read):
        stream = engine.add_request(tokens_of(5, 3), max_tokens=40)
        late = engine.add_request(tokens_of(0), **GREEDY)
        outs = [output for _ in range(20) for output in engine.step()]
        assert {output.request_id for output in outs} == {stream} and len(outs) > 15
        assert engine.metrics()["waiting"] == 1
        gate.set()
        completions = {}
        while engine.has_work:
            completions |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert completions[late].tokens == expected
    assert completions[late].cached_prompt_tokens == 48
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("action", ["abort", "timeout", "close"])
def test_a_request_that_waits_for_a_disk_that_hangs_can_end(action, tmp_path):
    model = tiny_models.tiny_model("llama")
    (expected,), *_ = outputs(model, [tokens_of(0)], tmp_path)
    engine, gate = make_engine(model, tmp_path), threading.Event()
    timeout = 0.05 if action == "timeout" else 30.0
    with (
        mock.patch.object(engine.scheduler.tier.store._packs, "read", lambda *a: gate.wait()),
        mock.patch.object(tier, "LOAD_TIMEOUT", timeout),
    ):
        request = engine.add_request(tokens_of(0), **GREEDY)
        assert engine.step() == [] and engine.has_work
        if action == "abort":
            assert engine.abort(request).tokens == [] and not engine.has_work
        else:
            if action == "close":
                threading.Timer(0.1, gate.set).start()
                engine.close()
            done = None
            while engine.has_work:
                for output in engine.step():
                    done = output.completion
            assert done.tokens == expected and done.cached_prompt_tokens == 0
        gate.set()
    engine.close()


@pytest.mark.slow
def test_a_disk_slower_than_the_model_is_not_read(tmp_path):
    model = tiny_models.tiny_model("llama")
    (expected,), *_ = outputs(model, [tokens_of(0)], tmp_path)
    engine = make_engine(model, tmp_path)
    engine.generate([tokens_of(7)], **GREEDY)  # the cost model learns
    store = engine.scheduler.tier.store
    store._bytes, store._seconds = 1.0, 1.0  # a byte a second
    done = engine.generate([tokens_of(0)], **GREEDY)[0]
    assert done.tokens == expected and done.cached_prompt_tokens == 0
    assert done.prefix_miss == "on_disk" and engine.metrics()["kv_disk"]["slower"] == 1
    engine.close()


@pytest.mark.slow
def test_a_slow_measurement_is_not_believed_for_ever(tmp_path):
    model = tiny_models.tiny_model("llama")
    outputs(model, [tokens_of(0)], tmp_path)
    engine = make_engine(model, tmp_path)
    held = engine.scheduler.tier
    held._seconds_to_compute = lambda start, stop: 1e-3
    held.store._bytes, held.store._seconds = 1e6, 10.0
    done = engine.generate([tokens_of(0)], max_tokens=1)[0]
    assert done.prefix_miss == "on_disk"
    for _ in range(300):
        engine.scheduler.allocator.store.drop_idle()
        if engine.generate([tokens_of(0)], max_tokens=1)[0].cached_prompt_tokens:
            break
    else:
        pytest.fail("the disk is never read again")
    engine.close()


@pytest.mark.slow
def test_blocks_of_a_planned_step_are_not_evicted_before_they_are_written(tmp_path):
    """Their content is not in the pool yet: what was there would be stored under their names."""
    model = tiny_models.tiny_model("llama")
    outputs(model, [tokens_of(0)], tmp_path)
    engine = make_engine(model, tmp_path, num_blocks=16)
    request = engine.request(engine.add_request(tokens_of(0), **GREEDY))
    held = engine.scheduler.tier
    deadline = time.monotonic() + TIMEOUT
    while not held._awaited[request.id].load.is_done and time.monotonic() < deadline:
        time.sleep(0.01)
    adopted = held._adopt(held._awaited[request.id])
    store = engine.scheduler.allocator.store
    assert len(adopted) == 12 and engine.scheduler.allocator.store.num_available == 4
    taken = store.take(4)
    assert not set(taken) & {block for load in adopted for block in load.blocks}
    store.release(taken)
    engine.scheduler.allocator.store.copies_done()
    assert engine.scheduler.allocator.store.num_available == 16
    engine.close()


@pytest.mark.slow
def test_no_disk_after_the_prefix_cache_was_reset(tmp_path):
    """The model may have other weights from then on."""
    model = tiny_models.tiny_model("llama")
    outputs(model, [tokens_of(0)], tmp_path)
    engine = make_engine(model, tmp_path)
    engine.add_request(tokens_of(0), **GREEDY)
    assert engine.scheduler.tier.loading, "it waits for the disk"
    engine.reset_prefix_cache()
    done = []
    while engine.has_work:
        done += [output.completion for output in engine.step() if output.completion]
    assert [each.cached_prompt_tokens for each in done] == [0]
    assert engine.metrics()["kv_disk"] is None
    make_engine(model, tmp_path).close()


@pytest.mark.slow
def test_the_memory_of_a_load_is_not_used_again_before_the_transfer_is_done(tmp_path):
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    (size,) = engine.scheduler.tier._entry_bytes
    staging = Staging(4 * size)
    rows, memory = staging.rows(4, size)
    memory[:] = 7
    slow = mx.ones((400, 400))
    mx.async_eval([slow := slow @ slow for _ in range(5)])  # before what the transfer computes
    engine.runner.transfer((), [BlockTransfer(b"", 0, [i], (rows, i)) for i in range(4)])
    del rows
    other, _ = staging.rows(4, size)
    assert isinstance(other, np.ndarray), "the transfer still reads the first rows"
    engine.generate([tokens_of(1)], **GREEDY)
    again, _ = staging.rows(4, size)
    assert isinstance(again, mx.array)
    engine.close()


@pytest.mark.slow
def test_the_first_token_after_a_load_does_not_wait_for_another_step(tmp_path):
    model, prompt = tiny_models.tiny_model("llama"), tokens_of(0, 48)
    expected, *_ = outputs(model, [prompt], tmp_path)
    engine = make_engine(model, tmp_path)
    engine.add_request(prompt, **GREEDY)
    tokens: list = []
    while not tokens:
        tokens += engine.step()
    assert not engine._pipeline.busy
    assert engine.metrics()["kv_disk"]["hits"] == 48 // SIZE
    while engine.has_work:
        tokens += engine.step()
    assert [[output.token for output in tokens]] == expected
    assert tokens[-1].completion.cached_prompt_tokens == 47, "all but the last token"
    engine.close()


@pytest.mark.slow
def test_a_load_that_is_done_does_not_wait_for_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tier, "WAIT", 60.0)
    model = tiny_models.tiny_model("llama")
    prompts = [tokens_of(0), tokens_of(1)]
    expected, *_ = outputs(model, prompts, tmp_path)
    engine = make_engine(model, tmp_path)
    store, gate, reads = engine.scheduler.tier.store, threading.Event(), count()
    read = store._packs.read

    def slow_read(*args):
        if next(reads) == 0:
            gate.wait(30)
        return read(*args)

    with mock.patch.object(store._packs, "read", slow_read):
        ids = [engine.add_request(prompt, **GREEDY) for prompt in prompts]
        completions = {}
        while len(completions) < len(ids):
            outs = engine.step()
            if outs and not gate.is_set():
                assert {output.request_id for output in outs} == {ids[1]}
                gate.set()
            completions |= {o.request_id: o.completion for o in outs if o.completion}
    assert [completions[each].tokens for each in ids] == expected
    engine.close()
