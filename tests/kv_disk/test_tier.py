"""An engine with a disk: the same tokens, fewer computed, and nothing shared that must not be."""

import os
import threading
import time
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from mlx.utils import tree_map

from mlx_paged import Engine, EngineService
from mlx_paged.kv.block_bytes import read_blocks, write_blocks
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.pool import KVPool, KVShape
from mlx_paged.kv_disk import opening, tier
from mlx_paged.kv_disk.packs import _check_thread
from mlx_paged.runner import model_runner
from mlx_paged.runner.model_runner import LaunchedStep

SIZE = 4
GREEDY = {"max_tokens": 6}


def tokens_of(seed: int, length: int = 50) -> list[int]:
    return np.random.default_rng(seed).integers(tiny_models.VOCAB, size=length).tolist()


def make_engine(model, directory=None, **options) -> Engine:
    options = {"block_size": SIZE, "num_blocks": 100, "prewarm": False} | options
    return Engine(model, kv_disk=directory, **options)


def outputs(model, prompts, directory=None, **options) -> tuple[list[list[int]], list[int], dict]:
    """Tokens, prompt tokens that were found, and the disk's metrics; the engine is closed."""
    salt = {"cache_salt": options.pop("salt", "")}
    engine = make_engine(model, directory, **options)
    if directory is not None:  # else it depends on the clock what is read
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
    done = [engine.generate([prompt], **GREEDY, **salt)[0] for prompt in prompts]
    engine.scheduler.allocator.check_integrity()
    metrics = engine.metrics()["kv_disk"]
    engine.close()
    return [c.tokens for c in done], [c.cached_prompt_tokens for c in done], metrics


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


@pytest.mark.parametrize("kv_bits", [8, "8,4"])
def test_quantized_blocks_come_back_for_the_same_bits_only(kv_bits, tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(0)]
    expected = outputs(model, prompts, kv_bits=kv_bits)[0]
    assert outputs(model, prompts, tmp_path)[1] == [0]
    for cached in (0, 48):
        found = outputs(model, prompts, tmp_path, kv_bits=kv_bits)
        assert found[:2] == (expected, [cached])


def test_what_is_read_is_what_was_written():
    for dtype, shape in [
        (mx.float16, (2, 8, 8)),
        (mx.bfloat16, (3, 5, 7)),
        (mx.float32, (1, 1, 1)),
    ]:
        for latent in (False, True) if shape[1] == 8 else (False,):
            shapes = [KVShape(*shape, dtype)] * 2
            if latent:
                shapes = [KVShape(1, 24, 16, dtype, latent=True)] * 2
            pool = KVPool(shapes, 10, 16)
            for layer in range(2):
                rows = [
                    mx.random.normal((160, shapes[0].n_kv_heads, dim)).astype(dtype)
                    for dim in shapes[0].row_dims
                ]
                pool.write(layer, *rows, mx.arange(160, dtype=mx.int32))
            before = [np.array(array.astype(mx.float32)) for array in pool.handles()]
            held = pool.handles()[0]
            write_blocks(pool, [1, 9], 0, np.array(read_blocks(pool, [3, 7], 0)))
            mx.eval(pool.handles())
            for old, array in zip(before, pool.handles(), strict=True):
                old[:, [1, 9]] = old[:, [3, 7]]
                np.testing.assert_array_equal(np.array(array.astype(mx.float32)), old)
            in_place = np.array(held.astype(mx.float32)) == before[0]
            assert in_place.all() or shape[1] != 8, "the pool was copied"


def test_quantized_arrays_are_read_and_written_too():
    pool = KVPool([KVShape(2, 8, 8, mx.float16)], 6, 4)
    for dtype, columns in [(mx.int8, 8), (mx.uint8, 5), (mx.float16, 1)]:
        array = mx.random.randint(0, 100, (6, 2, 4, columns)).astype(dtype).transpose(1, 0, 2, 3)
        mx.eval(array)
        handles = [array]
        with mock.patch.object(pool, "arrays_of", lambda group, h=handles: [(h, 0)]):
            before = np.array(array)
            write_blocks(pool, [4, 0], 0, np.array(read_blocks(pool, [1, 2], 0)))
        before[:, [4, 0]] = before[:, [1, 2]]
        np.testing.assert_array_equal(np.array(handles[0]), before)


@pytest.mark.parametrize("change", ["weights", "tokenizer", "block_size", "salt", "options"])
def test_nothing_is_found_by_who_must_not_find_it(change, tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(0)]
    outputs(model, prompts, tmp_path)
    options = {}
    if change == "weights":
        model.update(tree_map(lambda weight: weight * 1.001, model.parameters()))
    elif change == "options":
        model.args.rope_theta = 20000.0
    elif change == "salt":
        options["salt"] = "tenant"
    elif change == "block_size":
        options["block_size"] = 8
    with mock.patch.object(
        opening, "_vocabulary", lambda tokenizer: "other" if change == "tokenizer" else ""
    ):
        if change == "tokenizer":
            found = outputs(model, prompts, tmp_path, **options)
        else:
            mock.patch.stopall()
            found = outputs(model, prompts, tmp_path, **options)
    assert found[1] == [0] and found[2]["hits"] == 0
    assert found[0] == outputs(model, prompts, **options)[0]


def test_the_hash_of_weights_is_kept_while_their_files_do_not_change(tmp_path):
    model, files, cache = tiny_models.tiny_model("llama"), tmp_path / "model", tmp_path / "cache"
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"weights")
    first = opening.weights_hash(model, [files], cache)
    with mock.patch.object(opening, "_arrays_hash", side_effect=AssertionError("hashed again")):
        assert opening.weights_hash(model, [files], cache) == first
        times = os.stat(files / "model.safetensors")
        (files / "model.safetensors").write_bytes(b"Weights")
        os.utime(files / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(AssertionError, match="hashed again"):
            opening.weights_hash(model, [files], cache)
        with pytest.raises(AssertionError, match="hashed again"):
            opening.weights_hash(model, [files, tmp_path], cache)
    cache.write_bytes(b"\xff not json")
    assert opening.weights_hash(model, [files], cache) == first
    assert opening.weights_hash(model, [], cache) == first
    model.update(tree_map(lambda weight: weight * 1.001, model.parameters()))
    assert opening.weights_hash(model, [], cache) != first


def test_blocks_leave_for_the_disk_before_others_take_their_memory(tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(seed) for seed in range(6)]
    expected = outputs(model, prompts * 2)[0]
    found = outputs(model, prompts * 2, tmp_path, num_blocks=30)  # two of them at most
    assert found[0] == expected
    assert found[1][6:] == [48] * 6, "computed again in spite of the disk"
    unique = 6 * (50 + 5) // SIZE * (found[2]["bytes_written"] // found[2]["records"])
    assert found[2]["bytes_written"] <= unique


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


def test_a_block_that_is_used_again_is_written_at_once(tmp_path):
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    for tail in range(2):
        engine.generate([[*tokens_of(0), tail]], **GREEDY)
    engine.scheduler.tier.store.flush()
    assert engine.metrics()["kv_disk"]["records"] == 12
    engine.close()


def test_an_idle_service_writes(tmp_path):
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    with EngineService(engine) as service:
        service.submit(tokens_of(0), **GREEDY).result()
        deadline = time.monotonic() + 10
        while engine.metrics()["kv_disk"]["bytes_written"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.metrics()["kv_disk"]["records"] == 13
    engine.close()


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


def test_blocks_of_a_planned_step_are_not_evicted_before_they_are_written(tmp_path):
    """Their content is not in the pool yet: what was there would be stored under their names."""
    model = tiny_models.tiny_model("llama")
    outputs(model, [tokens_of(0)], tmp_path)
    engine = make_engine(model, tmp_path, num_blocks=16)
    request = engine.request(engine.add_request(tokens_of(0), **GREEDY))
    held = engine.scheduler.tier
    deadline = time.monotonic() + 10
    while not held._plans[request.id].load.is_done and time.monotonic() < deadline:
        time.sleep(0.01)
    adopted = held._adopt(held._plans[request.id])
    store = engine.scheduler.allocator.store
    assert len(adopted) == 12 and engine.scheduler.allocator.num_available == 4
    taken = store.take(4)
    assert not set(taken) & {block for load in adopted for block in load.blocks}
    store.release(taken)
    engine.scheduler.allocator.store.copies_done()
    assert engine.scheduler.allocator.num_available == 16
    engine.close()


def test_what_leaves_a_block_is_copied_before_another_group_fills_it(tmp_path):
    model = tiny_models.tiny_model("gpt_oss")
    engine = make_engine(model, tmp_path)
    engine.generate([tokens_of(0)], **GREEDY)
    groups, pool = engine.manager.plan.groups, engine.manager.pool
    sizes = engine.scheduler.tier._entry_bytes
    assert len(groups) == 2
    leaving = BlockTransfer(b"old", 1, range(groups[1].width))
    expected = np.array(read_blocks(pool, leaving.blocks, 1)).tobytes()
    coming = BlockTransfer(b"new", 0, range(groups[0].width), bytes([7]) * sizes[0])
    engine.runner.transfer([leaving], [coming])
    assert any(expected) and bytes(leaving.payload()) == expected
    assert bytes(read_blocks(pool, coming.blocks, 0)) == coming.payload
    engine.close()


def test_a_failed_copy_ends_the_step_under_way(tmp_path, monkeypatch):
    """The error may be of the device, and so of that step."""
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    monkeypatch.setattr(model_runner, "read_blocks", mock.Mock(side_effect=RuntimeError("device")))
    with pytest.raises(RuntimeError, match="device"):
        engine.runner.transfer([BlockTransfer(b"", 0, [0])], ())
    with pytest.raises(RuntimeError, match="device"):
        engine.runner.collect(LaunchedStep([], None))


def test_blocks_of_a_request_that_ended_by_a_stop_token_are_written_too(tmp_path):
    """The next step is under way when it ends, and nobody else reads that step."""
    model = tiny_models.tiny_model("llama")
    (tokens,), *_ = outputs(model, [tokens_of(0)])
    engine = make_engine(model, tmp_path)
    engine.generate([tokens_of(0)], max_tokens=9, stop_token_ids=tokens[2:3])
    assert engine._pipeline.busy and not engine.has_work
    engine.close()
    assert outputs(model, [tokens_of(0)], tmp_path)[1] == [48]


def test_blocks_are_written_while_a_request_is_open(tmp_path):
    model = tiny_models.tiny_model("llama")
    engine = make_engine(model, tmp_path)
    engine.add_request(tokens_of(0), max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.close()
    assert outputs(model, [tokens_of(0)], tmp_path)[1] == [48]


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


def test_a_step_copies_a_limited_number_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tier, "LEAVING_BYTES", 3000)
    model = tiny_models.tiny_model("llama")
    engine = make_engine(model, tmp_path, num_blocks=20)
    held, copied = engine.scheduler.tier, []
    size = held._entry_bytes[0]
    monkeypatch.setattr(engine.runner, "transfer", lambda stores, loads: copied.append(len(stores)))
    monkeypatch.setattr(held, "put", lambda stores: None)
    for seed in range(3):
        engine.generate([tokens_of(seed, 70)], **GREEDY)
    assert copied and max(copied) == -(-3000 // size) < 17
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk_gb": 0}, "kv_disk_gb is 0: expected a number > 0"),
        ({"prefix_cache": False}, "prefix_cache is False: expected True with kv_disk"),
    ],
)
def test_wrong_options_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_models.tiny_model("llama"), tmp_path, **options)


def test_two_engines_do_not_share_a_directory(tmp_path):
    model = tiny_models.tiny_model("llama")
    engine = make_engine(model, tmp_path)
    with pytest.raises(ValueError, match="expected a directory of its own"):
        make_engine(model, tmp_path)
    engine.close()
    make_engine(model, tmp_path).close()
