"""MLX's wired limit: raised while engines live, and restored."""

import gc

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream, wired_limit

import mlx_paged.kv.limits as limits_module
from mlx_paged import BatchGenerator, Engine, EngineService
from mlx_paged.kv.limits import HeldLimits
from tests.support import TIMEOUT
from tests.support.fake_macs import GB, FakeMac, fake_mac

BEFORE = 12345


@pytest.fixture
def mac(monkeypatch) -> FakeMac:
    mac = fake_mac(monkeypatch, "M4 Pro, 24 GB")
    mac.wired = BEFORE
    return mac


def make_engine(llama) -> Engine:
    return Engine(llama, num_blocks=32, wired=True)


@pytest.mark.slow
def test_it_is_raised_while_an_engine_lives(mac, llama):
    engine = make_engine(llama)
    engine.generate([[1, 2, 3]], max_tokens=3)
    assert mac.calls == [mac.working_set]
    del engine
    gc.collect()
    assert mac.calls == [mac.working_set, ("synchronize", None), BEFORE]


@pytest.mark.parametrize(
    ("option", "variable", "is_raised"),
    [
        (None, None, False),
        (None, "1", True),
        (None, "0", False),
        (False, "1", False),
        (True, "0", True),
    ],
)
def test_the_option_decides_and_then_the_environment(
    mac, llama, monkeypatch, option, variable, is_raised
):
    if variable is not None:
        monkeypatch.setenv("MLX_PAGED_WIRED", variable)
    for make in (Engine, BatchGenerator):
        owner = make(llama, num_blocks=32, wired=option)
        assert mac.wired == (mac.working_set if is_raised else BEFORE)
        owner.close()
        assert mac.wired == BEFORE


def test_one_that_asks_beside_others_that_do_not(mac, llama):
    """It is lowered with that one, after a wait, while the others go on."""
    other = Engine(llama, num_blocks=32, wired=False)
    assert mac.calls == []
    engine = make_engine(llama)
    assert mac.wired == mac.working_set
    engine.close()
    assert mac.calls == [mac.working_set, ("synchronize", None), ("synchronize", None), BEFORE]
    other.close()
    assert mac.wired == BEFORE and mac.calls.count(BEFORE) == 1


@pytest.mark.slow
def test_the_last_of_several_engines_restores_it(mac, llama):
    first, second = make_engine(llama), make_engine(llama)
    third = make_engine(llama)
    del first
    gc.collect()
    third.close()
    assert mac.wired == mac.working_set and mac.calls.count(mac.working_set) == 1
    second.close()
    assert mac.wired == BEFORE


@pytest.mark.slow
def test_an_engine_made_later_raises_it_again(mac, llama):
    make_engine(llama).close()
    assert mac.wired == BEFORE
    engine = make_engine(llama)
    assert mac.wired == mac.working_set
    engine.close()
    assert mac.wired == BEFORE


@pytest.mark.slow
def test_a_closed_engine_goes_on_and_gives_nothing_back_twice(mac, llama):
    engine, other = make_engine(llama), make_engine(llama)
    engine.close()
    engine.close()
    engine.generate([[1, 2, 3]], max_tokens=3)
    del engine
    gc.collect()
    assert mac.wired == mac.working_set
    other.close()
    assert mac.wired == BEFORE


@pytest.mark.slow
def test_it_is_raised_in_a_service(mac, llama):
    with EngineService(make_engine(llama)) as service:
        service.submit([1, 2, 3], max_tokens=3).result()
        assert service.call(lambda engine: mac.wired) == mac.working_set
    del service
    gc.collect()
    assert mac.wired == BEFORE


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_a_batch_generator_restores_it_when_its_stream_is_done(mac, llama, how):
    generator = BatchGenerator(llama, num_blocks=32, wired=True)
    generator.insert([[1, 2, 3]], [3])
    generator.next()
    assert mac.calls == [mac.working_set]
    if how == "closed":
        generator.close()
    del generator
    gc.collect()
    assert mac.calls[1] == ("synchronize", generation_stream)
    assert mac.wired == BEFORE and mac.calls.count(BEFORE) == 1


@pytest.mark.slow
def test_mlx_lms_own_limit_within_leaves_it_raised(mac, llama):
    engine = make_engine(llama)
    with wired_limit(llama):
        make_engine(llama).close()
        assert mac.wired == mac.working_set
    assert mac.wired == mac.working_set
    engine.close()
    assert mac.wired == BEFORE


def test_a_limit_that_somebody_else_has_set_meanwhile_stays(mac, llama):
    """mlx-lm's was set before and restored within."""
    others = wired_limit(llama)
    others.__enter__()
    engine = make_engine(llama)
    others.__exit__(None, None, None)
    assert mac.wired == BEFORE
    engine.close()
    assert mac.wired == BEFORE


@pytest.mark.slow
def test_it_is_restored_where_the_device_fails(mac, monkeypatch):
    def fail(stream=None) -> None:
        raise RuntimeError("device error")

    held = HeldLimits(GB, wired=True)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "synchronize", fail)
        with pytest.raises(RuntimeError, match="device error"):
            held.release()
    assert mac.wired == BEFORE


@pytest.mark.slow
def test_it_is_restored_where_an_engine_is_closed_on_a_device_that_fails(mac, llama, monkeypatch):
    def fail(stream=None) -> None:
        raise RuntimeError("device error")

    engine = make_engine(llama)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "synchronize", fail)
        with pytest.raises(RuntimeError, match="device error"):
            engine.close()
    assert mac.wired == BEFORE


@pytest.mark.slow
def test_a_holder_may_die_while_another_begins(mac, monkeypatch):
    """The garbage collector runs at any moment."""
    owners = [HeldLimits(GB, wired=True)]
    limit = limits_module._limits
    lock = limit._lock

    class CollectingLock:
        def __enter__(self) -> None:
            assert lock.acquire(timeout=TIMEOUT)
            owners.clear()

        def __exit__(self, *exception: object) -> None:
            lock.release()

    monkeypatch.setattr(limit, "_lock", CollectingLock())
    owner = HeldLimits(GB, wired=True)
    assert not owners and mac.wired == mac.working_set
    del owner
    assert mac.wired == BEFORE


def test_on_a_cpu_nothing_is_set(monkeypatch, llama):
    calls = []
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    monkeypatch.setattr(mx, "set_wired_limit", calls.append)
    make_engine(llama).close()
    with mx.stream(mx.cpu):
        BatchGenerator(llama, num_blocks=32, wired=True).close()
    assert calls == []
