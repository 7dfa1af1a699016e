"""Commands answer at once, before slow imports, and Ctrl-C at their start leaves no traceback."""

import signal
import subprocess
import sys

import pytest

import mlx_paged
from mlx_paged.__main__ import BENCHES
from mlx_paged.cli import Parser
from tests.support import TIMEOUT

SLOW = {"mlx", "mlx_lm", "numpy", "transformers"}
COMMANDS = ("generate", "server", "run", "doctor", "kv_disk", "terminal")
HELP = [
    *(["-m", "mlx_paged", *arguments] for arguments in ([], ["--version"], ["bench", "--help"])),
    *(["-m", f"mlx_paged.{name}", "--help"] for name in COMMANDS),
    *(["-m", "mlx_paged", "bench", name, "--help"] for name in BENCHES),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT
    )


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_imports_nothing_slow(arguments):
    shown = run("-X", "importtime", *arguments)
    assert shown.returncode == 0 and len(shown.stdout.split()) > 1
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "mlx_paged" in imported
    assert imported & SLOW == set()


@pytest.mark.parametrize("name", BENCHES)
def test_a_mistake_of_a_bench_comes_before_slow_imports(name):
    found = run("-X", "importtime", "-m", "mlx_paged", "bench", name, "--no-such-flag")
    assert found.returncode == 2 and found.stderr.endswith("arguments: --no-such-flag\n")
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in found.stderr.splitlines()}
    assert "mlx_paged" in imported and imported & SLOW == set()


def test_the_package_itself_imports_nothing_slow():
    code = "import sys, mlx_paged; print(*{name.split('.')[0] for name in sys.modules})"
    assert set(run("-c", code).stdout.split()) & SLOW == set()


def test_exported_names_are_there_at_their_first_use():
    code = (
        "import mlx_paged; assert set(mlx_paged.__all__) <= set(dir(mlx_paged));"
        "print(*(f'{getattr(mlx_paged, name).__module__}.{name}' for name in mlx_paged.__all__))"
    )
    found = run("-c", code)
    assert found.stderr == ""
    assert len(found.stdout.split()) == len(mlx_paged.__all__) > 20
    star = run("-c", "from mlx_paged import *; print(Engine.__name__, SamplingParams.__name__)")
    assert star.stdout == "Engine SamplingParams\n"
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = mlx_paged.Engin


def test_an_mlx_that_does_not_fit_is_one_line():
    code = (
        "import importlib.metadata as m, runpy, sys; known = m.version;"
        "m.version = lambda name: '0.31.0' if name == 'mlx' else known(name);"
        "sys.argv[1:] = {!r}; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
    )
    for name, arguments in {
        "generate": ["-p", "x"],
        "server": [],
        "doctor": [],
        "run": ["-m", "json.tool"],
    }.items():
        found = run("-c", code.format(arguments, f"mlx_paged.{name}"))
        assert found.returncode == 2, name
        assert found.stderr.count("\n") == 1 and "mlx 0.31.0 is installed" in found.stderr
    found = run("-c", code.split("sys.argv")[0] + "from mlx_paged import Engine")
    assert "UntestedVersionError: mlx 0.31.0 is installed" in found.stderr


def test_ctrl_c_within_an_exec_of_a_text_is_a_status_too(tmp_path, monkeypatch):
    """CPython ends such a module by SIGINT, even though the exception is caught."""
    (tmp_path / "interrupted.py").write_text(
        "from mlx_paged.starting import start\n"
        "start(lambda: exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)'))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run("-m", "interrupted")
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("name", ["generate", "server", "doctor"])
def test_ctrl_c_while_a_command_starts_leaves_no_traceback(name):
    """Python itself imports nothing of the package before the marker is on stderr."""
    arguments = {"generate": ["-p", "x"], "server": ["--port", "0"], "doctor": []}[name]
    command = [sys.executable, "-X", "importtime", "-m", f"mlx_paged.{name}", *arguments]
    for module in ("mlx_paged.cli", "numpy", "mlx_lm.utils"):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            while line := process.stderr.readline():
                if line.rpartition("|")[2].strip() == module:
                    break
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=TIMEOUT)
        assert process.returncode == (0 if name == "server" else 130), (module, rest)
        assert "Traceback" not in rest


def test_a_flag_that_does_not_exist_is_answered_with_a_similar_one(capsys):
    parser = Parser("program")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--policy", choices=["fcfs", "priority"])
    for given, hint in {
        ("--max_tokens", "3"): "--max_tokens 3 (did you mean --max-tokens?)",
        ("--max-token=3", "--polcy=x"): "--polcy=x (did you mean --policy?)",
        ("--zzzz",): "--zzzz",
        ("--policy", "prio"): "(choose from 'fcfs', 'priority') (did you mean priority?)",
    }.items():
        with pytest.raises(SystemExit):
            parser.parse_args(given)
        assert capsys.readouterr().err.endswith(f"{hint}\n")
