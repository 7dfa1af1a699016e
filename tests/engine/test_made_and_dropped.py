"""What an engine leaves behind when nobody refers to it any more."""

import gc
import subprocess
import sys
import threading

import mlx.core as mx
import mlx_lm
import pytest

from mlx_paged import Engine, EngineService, demo_model_path, ops, patched_mlx_lm
from mlx_paged.metrics.stats import resident_bytes
from scripts.made_and_dropped import PROMPT, ROOM, grown, kinds_of, measure
from tests.support import TIMEOUT


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = mlx_lm.load(str(demo_model_path()))[:2]
    mx.eval(model.state)
    return model, tokenizer


@pytest.mark.sampled(2)
def test_nothing_grows(loaded, tmp_path):
    kinds = kinds_of(*loaded, str(tmp_path))
    assert len(kinds) > 10
    for name, (first, last) in measure(kinds, 3).items():
        assert grown(first, last) == [], name


@pytest.mark.slow
def test_a_pool_is_free_as_soon_as_its_engine_is_dropped(loaded):
    gc.collect()
    before = ops.reserved_bytes()
    engine = Engine(*loaded, compile=True, **ROOM)
    engine.generate([PROMPT], max_tokens=3)
    assert ops.reserved_bytes() >= before + engine.manager.pool.nbytes
    gc.disable()
    try:
        del engine
        assert ops.reserved_bytes() == before
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes memory where it is written")
def test_a_pool_takes_memory_where_it_is_written(loaded):
    before = resident_bytes()
    engine = Engine(*loaded, kv_memory=1 << 30)
    assert engine.manager.pool.nbytes > 900 << 20
    engine.generate([PROMPT], max_tokens=3)
    assert resident_bytes() - before < 200 << 20


def make(*loaded):
    Engine(*loaded, compile=True, prewarm=False, **ROOM)


def use(*loaded):
    Engine(*loaded, compile=False, **ROOM).generate([PROMPT], max_tokens=3)


def use_drop_in(*loaded):
    with patched_mlx_lm():
        mlx_lm.generate(*loaded, PROMPT, max_tokens=3)


@pytest.mark.parametrize("work", [make, use, use_drop_in])
def test_graphs_of_a_thread_are_freed_before_it_ends(loaded, monkeypatch, work):
    cleared = []
    monkeypatch.setattr(ops, "clear_compiled", lambda: cleared.append(threading.get_ident()))
    thread = threading.Thread(target=work, args=loaded)
    thread.start()
    thread.join()
    assert cleared == [thread.ident]


@pytest.mark.slow
def test_a_process_ends_cleanly_after_a_thread_has_used_compiled_decodes():
    code = f"""
import threading, mlx_lm, mlx_paged
loaded = mlx_lm.load(str(mlx_paged.demo_model_path()))[:2]
engines = []
def use():
    engines.append(mlx_paged.Engine(*loaded, compile=True, **{ROOM!r}))
    engines[0].generate(["class"], max_tokens=3)
thread = threading.Thread(target=use)
thread.start()
thread.join()
"""
    for _ in range(3):  # without the guard three of four abort
        subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT)


@pytest.mark.slow
def test_a_directory_of_a_dropped_engine_is_free(loaded, tmp_path):
    for _ in range(2):
        engine = Engine(*loaded, kv_disk=tmp_path, **ROOM)
        engine.generate([PROMPT], max_tokens=3)
        del engine


class TestOneThread:
    def test_other_threads_are_refused_while_a_service_runs(self, loaded):
        engine = Engine(*loaded, prewarm=None, compile=True, **ROOM)
        with EngineService(engine) as service:
            ticket = service.submit(PROMPT, max_tokens=40)
            for _ in range(20):
                with pytest.raises(RuntimeError, match="while another thread uses the engine"):
                    engine.generate(["class"], max_tokens=2)
            with pytest.raises(RuntimeError, match="while another thread"):
                engine.warm_up()
            assert len(ticket.result(30).tokens) == 40
        assert len(engine.generate(["class"], max_tokens=2)) == 1

    def test_a_second_service_is_refused(self, loaded, capfd):
        engine = Engine(*loaded, prewarm=None, **ROOM)
        with EngineService(engine) as service:
            second = EngineService(engine)
            with pytest.raises(RuntimeError, match="expected one service for an engine"):
                second.start()
            with pytest.raises(RuntimeError, match="expected a new service"):
                second.start()
            second.close()
            assert service.submit(PROMPT, max_tokens=3).result(30).finish_reason == "length"
        assert capfd.readouterr().err == ""
        with EngineService(engine) as third:
            assert third.submit(PROMPT, max_tokens=3).result(30).finish_reason == "length"
