"""Which blocks an engine copies out of its pool for the disk, and when."""

import time
from unittest import mock

import numpy as np
import pytest

from mlx_paged import EngineService
from mlx_paged.kv.block_bytes import read_blocks
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv_disk import tier
from mlx_paged.kv_disk.packs import FILE_MAGIC, HEADER
from mlx_paged.runner import model_runner
from mlx_paged.runner.model_runner import LaunchedStep
from mlx_paged.scheduler.step import Step, StepReport
from tests.support import TIMEOUT
from tests.support.engine.disk_engines import GREEDY, SIZE, make_engine, outputs, tokens_of
from tests.support.models import tiny_models


@pytest.mark.slow
def test_blocks_leave_for_the_disk_before_others_take_their_memory(tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(seed) for seed in range(6)]
    expected = outputs(model, prompts * 2)[0]
    found = outputs(model, prompts * 2, tmp_path, num_blocks=30)  # two of them at most
    assert found[0] == expected
    assert found[1][6:] == [48] * 6, "computed again in spite of the disk"
    texts = [(*prompt, *answer[:-1]) for prompt, answer in zip(prompts * 2, expected, strict=True)]
    unique = {text[:n] for text in texts for n in range(SIZE, len(text) + 1, SIZE)}
    record = HEADER.size + make_engine(model).manager.pool.block_bytes
    sizes = [path.stat().st_size - len(FILE_MAGIC) for path in tmp_path.glob("*.kv")]
    assert sum(sizes) == len(unique) * record


@pytest.mark.slow
def test_a_block_that_is_used_again_is_written_at_once(tmp_path):
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    for tail in range(2):
        engine.generate([[*tokens_of(0), tail]], **GREEDY)
    engine.scheduler.tier.store.flush()
    assert engine.metrics()["kv_disk"]["records"] == 12
    engine.close()


@pytest.mark.slow
def test_an_idle_service_writes(tmp_path):
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    with EngineService(engine) as service:
        service.submit(tokens_of(0), **GREEDY).result()
        deadline = time.monotonic() + TIMEOUT
        while engine.metrics()["kv_disk"]["bytes_written"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.metrics()["kv_disk"]["records"] == 13
    engine.close()


@pytest.mark.slow
def test_what_leaves_a_block_is_copied_before_another_group_fills_it(tmp_path):
    model = tiny_models.tiny_model("gpt_oss")
    engine = make_engine(model, tmp_path)
    engine.generate([tokens_of(0)], **GREEDY)
    groups, pool = engine.manager.plan.groups, engine.manager.pool
    sizes = engine.scheduler.tier._entry_bytes
    assert len(groups) == 2
    leaving = BlockTransfer(b"old", 1, range(groups[1].width))
    expected = np.array(read_blocks(pool, leaving.blocks, 1)).tobytes()
    rows = np.full((2, sizes[0]), 7, np.uint8)
    coming = BlockTransfer(b"new", 0, range(groups[0].width), (rows, 1))
    engine.runner.transfer([leaving], [coming])
    assert any(expected) and bytes(leaving.payload()) == expected
    assert bytes(read_blocks(pool, coming.blocks, 0)) == bytes(rows[1])
    engine.close()


@pytest.mark.slow
def test_a_failed_copy_ends_the_step_under_way(tmp_path, monkeypatch):
    """The error may be of the device, and so of that step."""
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    monkeypatch.setattr(model_runner, "read_blocks", mock.Mock(side_effect=RuntimeError("device")))
    with pytest.raises(RuntimeError, match="device"):
        engine.runner.transfer([BlockTransfer(b"", 0, [0])], ())
    with pytest.raises(RuntimeError, match="device"):
        engine.runner.collect(LaunchedStep(StepReport(Step()), [], None))


@pytest.mark.slow
def test_blocks_of_a_request_that_ended_by_a_stop_token_are_written_too(tmp_path):
    """The next step is under way when it ends, and nobody else reads that step."""
    model = tiny_models.tiny_model("llama")
    (tokens,), *_ = outputs(model, [tokens_of(0)])
    engine = make_engine(model, tmp_path)
    engine.generate([tokens_of(0)], max_tokens=9, stop_token_ids=tokens[2:3])
    assert engine._pipeline.busy and not engine.has_work
    engine.close()
    assert outputs(model, [tokens_of(0)], tmp_path)[1] == [48]


@pytest.mark.slow
def test_blocks_are_written_while_a_request_is_open(tmp_path):
    model = tiny_models.tiny_model("llama")
    engine = make_engine(model, tmp_path)
    engine.add_request(tokens_of(0), max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.close()
    assert outputs(model, [tokens_of(0)], tmp_path)[1] == [48]


@pytest.mark.slow
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


@pytest.mark.slow
def test_blocks_leave_a_nearly_full_pool_early_and_a_few_in_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(tier, "EARLY_BYTES", 1)
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path, num_blocks=30)
    copied, transfer = [], engine.runner.transfer

    def watched(stores, loads):
        copied.append(len(stores))
        transfer(stores, loads)

    monkeypatch.setattr(engine.runner, "transfer", watched)
    engine.add_request(tokens_of(0, 60), max_tokens=60)
    for _ in range(10):
        engine.step()
    assert not copied, "half of the pool is free"
    for _ in range(46):
        engine.step()
    assert engine.scheduler.allocator.store.evictions == 0
    assert len(copied) > 5 and set(copied) == {1}
    engine.close()


@pytest.mark.slow
def test_an_error_of_a_copy_in_an_idle_engine_is_of_no_later_request(tmp_path, monkeypatch):
    model = tiny_models.tiny_model("llama")
    (expected,), *_ = outputs(model, [tokens_of(0)])
    engine = make_engine(model, tmp_path)
    engine.generate([tokens_of(1)], **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "read_blocks", mock.Mock(side_effect=RuntimeError("device")))
        assert not engine.copy_when_idle()
    done = engine.generate([tokens_of(0)], **GREEDY)[0]
    assert done.tokens == expected and done.error is None and engine.stats.faults == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_copied_after_a_step_is_kept_if_that_step_is_right(fails, tmp_path, monkeypatch):
    """A step without tokens copies what the step under way has still to compute."""
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    request = engine.add_request(tokens_of(0), **GREEDY)
    engine.step()
    assert engine._pipeline.busy
    leaving = Step(stores=[BlockTransfer(bytes(24), 0, [0])])
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: leaving)
        if fails:
            patch.setattr(engine.runner, "collect", mock.Mock(side_effect=RuntimeError("device")))
        engine.step()
    assert (bytes(24) in engine.scheduler.tier.store) is not fails
    engine.abort(request)
    engine.close()


@pytest.mark.slow
def test_a_second_use_copies_a_few_blocks_in_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(tier, "EARLY_BYTES", 1)
    engine = make_engine(tiny_models.tiny_model("llama"), tmp_path)
    engine.generate([tokens_of(0)], **GREEDY)
    transfer = mock.Mock(side_effect=engine.runner.transfer)
    monkeypatch.setattr(engine.runner, "transfer", transfer)
    engine.generate([tokens_of(0)], **GREEDY)
    assert [len(call.args[0]) for call in transfer.call_args_list] == [1]
    engine.close()
