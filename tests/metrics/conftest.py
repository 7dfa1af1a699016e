"""Fixtures of several files of this folder."""

import pytest

from tests.support.simulation.fake_model import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    """Time passes only where a test advances it."""
    return FakeClock()
