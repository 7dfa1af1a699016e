"""The rehearsal of packages serves an index that pip reads, and finds a package of others."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlx_paged import _ext
from scripts.package_rehearsal import FailedError, is_of_wheel, main, run, serve
from tests.project.test_pip_resolution import add


def wheel_with(folder, content):
    wheel = folder / "mlx_paged-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("mlx_paged/_ext.cpython-311-x86_64-linux-gnu.so", content)
    return wheel


def test_another_module_than_the_wheels_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.package_rehearsal.run", lambda *_, **__: _ext.__file__ + "\n")
    own = wheel_with(tmp_path, Path(_ext.__file__).read_bytes())
    assert is_of_wheel(tmp_path / "python", own) == own.name
    other = wheel_with(tmp_path, b"other")
    with pytest.raises(FailedError, match="another mlx-paged than"):
        is_of_wheel(tmp_path / "python", other)


def test_pip_reads_the_index(tmp_path):
    (tmp_path / "some-name").mkdir()
    add(tmp_path / "some-name", "some-name", "1.5")
    pages = serve(tmp_path)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    url = f"http://127.0.0.1:{pages.server_port}/"
    command += [str(tmp_path / "got"), "--index-url", url, "some-name"]
    done = subprocess.run(command, capture_output=True, text=True)
    pages.shutdown()
    pages.server_close()
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == [
        "some_name-1.5-py3-none-any.whl"
    ]


def test_what_is_tried_does_not_import_from_this_process_s_path(monkeypatch, tmp_path):
    """With PYTHONPATH of a clone, the installed package would not be the one that is imported."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    printed = run(
        sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')", cwd=tmp_path.parent
    )
    assert str(tmp_path) not in printed.split("\n") and "site-packages" in printed


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/true"])
def test_what_is_no_python_is_refused(python, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--python", python])
    assert stopped.value.code == 2
    expected = f"--python is ['{python}']: expected interpreters of 3.11, 3.12, 3.13, 3.14"
    assert expected in capsys.readouterr().err
