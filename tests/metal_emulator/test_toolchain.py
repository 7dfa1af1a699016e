"""Where the emulator cannot run, and what it leaves on disk where it can."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from . import cache, toolchain
from .build import build_runtime
from .library import Library
from .pytest_support import require_emulator

SOURCE = "kernel void f(device int* p [[buffer(0)]]) { p[0] = 7; }"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "")
    toolchain.missing.cache_clear()
    yield
    monkeypatch.undo()
    toolchain.missing.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_the_message_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "needs clang.*: apt-get install --no-install-recommends clang-19 .* llvm-19"
    with pytest.raises(toolchain.ToolchainMissing, match=message):
        Library.from_source(SOURCE, "f.metal")
    outcomes = (pytest.skip.Exception, pytest.fail.Exception)
    for required, outcome in zip(("0", "1"), outcomes, strict=True):
        monkeypatch.setenv("METAL_EMULATOR_REQUIRED", required)
        with pytest.raises(outcomes, match=message) as raised:
            require_emulator()
        assert raised.type is outcome


@pytest.mark.slow
def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_runtime()  # which may go to the other directory
    monkeypatch.setenv("METAL_EMULATOR_CACHE", str(tmp_path))
    for _ in range(2):
        value = np.zeros(1, np.int32)
        library = Library.from_source(SOURCE, "f.metal")
        library.launch("f", grid=(1, 1, 1), threadgroup=(1, 1, 1), buffers={0: value})
        assert value[0] == 7
    assert len(list(tmp_path.glob("*.so"))) == 1
    other_source = SOURCE.replace("7", "8")
    Library.from_source(other_source, "f.metal")
    assert len(list(tmp_path.glob("*.so"))) == 2
    directories = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert directories == {"generated", "metal_headers"}  # no copy is left


def test_the_cache_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "MAX_BYTES", 2500)

    def make(path: Path) -> None:
        path.write_bytes(bytes(1000))

    for name in ("first", "second", "third"):
        cache.cached(".so", [name], make)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.so")]
    assert sizes == [1000, 1000]


def test_another_process_may_delete_what_the_cache_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_EMULATOR_CACHE", str(tmp_path))
    (tmp_path / "gone.so").symlink_to(tmp_path / "deleted.so")  # listed, but not there
    path = cache.cached(".so", ["first"], lambda path: path.touch())
    assert path.exists()
