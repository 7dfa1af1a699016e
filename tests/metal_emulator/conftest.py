"""Skips everything here on a machine that cannot run the emulator."""

import pytest

from .pytest_support import require_emulator


@pytest.fixture(autouse=True, scope="session")
def emulator() -> None:
    require_emulator()
