"""On a Mac marked tests are on the GPU, others on the CPU; what a hosted Mac lacks is skipped."""

import subprocess
import sys

import mlx.core as mx
import pytest

from tests.support import devices
from tests.support.devices import CPU_SUMS, GPU_SUMS, device_of_test, tolerance, what_lacks

HOSTED, REAL = "Apple Paravirtual device", "Apple M4 Pro"
NO_KERNEL = RuntimeError("[metal::Device] Unable to load kernel paged_attention\nmore")


@pytest.mark.parametrize(
    ("is_marked", "has_gpu", "expected"),
    [(True, True, mx.gpu), (False, True, mx.cpu), (True, False, mx.cpu)],
)
def test_only_marked_tests_are_on_the_gpu_of_a_mac(is_marked, has_gpu, expected, monkeypatch):
    monkeypatch.setattr(mx, "is_available", lambda device: has_gpu)
    assert device_of_test(is_marked, "darwin") == mx.Device(expected)
    assert device_of_test(is_marked, "linux") is None


def test_a_gpu_has_its_own_tolerances(monkeypatch):
    assert tolerance(mx.float32) == tolerance(mx.float32, "reference") == CPU_SUMS
    assert tolerance(mx.float16) == 2.0**-11 + CPU_SUMS
    monkeypatch.setattr(devices, "is_gpu", lambda: True)
    assert tolerance(mx.bfloat16) == 2.0**-8 + GPU_SUMS
    assert tolerance(mx.bfloat16) < tolerance(mx.bfloat16, "reference") < 2.0**-5


@pytest.mark.parametrize(
    ("error", "name", "is_lack"),
    [
        (NO_KERNEL, HOSTED, True),
        (NO_KERNEL, REAL, False),
        (AssertionError("[METAL] wrong"), HOSTED, False),
        (RuntimeError("the engine is closed"), HOSTED, False),
    ],
)
def test_only_what_a_paravirtual_gpu_lacks_is_skipped(error, name, is_lack):
    reason = what_lacks(error, name)
    assert reason == (f"{HOSTED}: {str(error).splitlines()[0]}" if is_lack else None)


CASES = """
import mlx.core as mx, pytest
mx.device_info = lambda: {"device_name": "Apple Paravirtual device"}
def test_lacks(): raise RuntimeError("[metal::Device] no such kernel")
def test_wrong(): assert False
def test_right(): pass
"""


@pytest.mark.slow
def test_the_suite_skips_it_with_its_reason(pytestconfig, tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES)
    conftest = pytestconfig.rootpath / "tests" / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "Apple Paravirtual device: [metal::Device] no such kernel" in done.stdout
