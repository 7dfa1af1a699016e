"""An engine and the services started on it, checked for what they leave behind."""

import threading

import pytest

from mlx_paged import Engine
from mlx_paged.engine.service import EngineService
from tests.support.engine.service_harness import THREAD, CountedQueue, model


@pytest.fixture
def engine():
    return Engine(model(), block_size=4, num_blocks=96, prefill_chunk=16, max_running=12)


@pytest.fixture
def serve(engine):
    """Starts a service; afterwards it leaves no thread and no block."""
    services = []

    def start(**options):
        service = EngineService(engine, **options)
        service._calls = CountedQueue()
        services.append(service)
        return service.start()

    yield start
    for service in services:
        service.close()
    assert THREAD not in {thread.name for thread in threading.enumerate()}
    assert engine.manager.blocks_in_use == 0 and not engine.has_work
    engine.manager.check_integrity()
