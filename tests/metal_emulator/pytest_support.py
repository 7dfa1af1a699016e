"""For tests that run kernels on the emulator."""

import pytest

from . import toolchain


def require_emulator() -> None:
    """Skip the test if the emulator cannot run here; fail if METAL_EMULATOR_REQUIRED=1."""
    reason = toolchain.missing()
    if not reason:
        return
    if toolchain.is_required():
        pytest.fail(f"METAL_EMULATOR_REQUIRED=1, but {reason}", pytrace=False)
    pytest.skip(reason)
