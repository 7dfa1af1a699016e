"""Garbage collections are timed by thread, and only while one watches."""

import gc
import threading
from collections.abc import Iterator

import pytest

from mlx_paged import Engine
from mlx_paged.engine.pipeline import StepPipeline
from mlx_paged.loading import load_model
from mlx_paged.metrics.recorder import GcPauses
from mlx_paged.scheduler.step import Observers


@pytest.fixture
def slow_collections(clock) -> Iterator[None]:
    """Each collection takes two seconds; none starts by itself."""

    def spend(phase: str, info: dict[str, int]) -> None:
        clock.now += phase == "start"
        clock.now += phase == "stop"

    gc.disable()
    yield gc.callbacks.append(spend)
    gc.callbacks.remove(spend)
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("slow_collections")
def test_a_collection_is_counted_on_its_thread(clock):
    pauses = GcPauses(clock)
    pauses.watch()
    gc.collect()
    assert (pauses.seconds, pauses.elsewhere) == (1, 0)  # the last second is after the stop
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    pauses.close()
    gc.collect()
    assert (pauses.seconds, pauses.elsewhere) == (1, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_collections")
def test_the_thread_that_watches_is_the_one_that_matters(clock):
    pauses = GcPauses(clock)

    def work() -> None:
        pauses.watch()
        gc.collect()

    pauses.watch()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    pauses.close()
    assert (pauses.seconds, pauses.elsewhere) == (1, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_collections")
def test_the_working_clock_stands_still_meanwhile(clock):
    pauses = GcPauses(clock)
    pipeline = StepPipeline(None, None, pauses, Observers())
    before = pipeline._now()
    pauses.watch()
    gc.collect()
    pauses.close()
    clock.now += 5
    assert pipeline._now() - before == 5 + 1


@pytest.mark.usefixtures("slow_collections")
def test_a_thread_may_begin_to_watch_while_another_one_notes_the_end(clock, monkeypatch):
    raised = []
    monkeypatch.setattr("sys.unraisablehook", raised.append)

    def read() -> float:
        if clock.now:  # the collection has ended
            pauses.watch()
        return clock()

    pauses = GcPauses(read)
    pauses.watch()
    clock.now = -1.0
    gc.collect()
    pauses.close()
    assert raised == []


def test_no_callback_is_left_between_steps():
    """It would swallow a Ctrl-C that comes during a collection."""
    callbacks = list(gc.callbacks)
    engine = Engine(*load_model(), num_blocks=16)
    engine.add_request("import os", max_tokens=4)
    while engine.has_work:
        engine.step()
        assert gc.callbacks == callbacks
