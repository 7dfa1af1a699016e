"""Programs under ``python -m mlx_paged.run`` run as alone, but on paged caches."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.cli import demo_model_path
from tests.support import TIMEOUT

ROOT = str(Path(__file__).resolve().parents[2])
MODEL = str(demo_model_path())
RUN = ["-m", "mlx_paged.run"]

REPORT = """
import sys

LOADED = {"mlx", "mlx_lm", "mlx_paged", "numpy"} & sys.modules.keys()
if __name__ == "__main__":
    print(sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name)
    print(LOADED, sys.flags.optimize, "sitecustomize" in sys.modules)
    from mlx_lm import generate, load
    model, tokenizer = load(sys.argv[1])
    print(generate(model, tokenizer, prompt="def main():", max_tokens=24), flush=True)
    sys.exit(7)
"""

SITECUSTOMIZE = """
import atexit, sys

@atexit.register
def report():
    if "mlx_lm" in sys.modules:
        name = sys.modules["mlx_lm.generate"].make_prompt_cache.__module__
        print(f"made by {name}", file=sys.stderr)
"""
"""A program's own one: tells at the end of each process who makes its caches."""

OURS, THEIRS = "made by mlx_paged.drop_in.patch", "made by mlx_lm.models.cache"

CHILD = """
import multiprocessing, os, subprocess, sys

def maker():
    had = "mlx_lm" in sys.modules
    from mlx_lm.models.cache import make_prompt_cache
    return had, make_prompt_cache.__module__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(maker))
    code = f"import sys; sys.path.insert(0, {sys.path[0]!r}); from tool import maker; "
    for code in (code + "print(maker())", "import sys; print('mlx_lm' in sys.modules)"):
        print(subprocess.check_output([sys.executable, "-c", code], text=True), end="")
    os.environ["MLX_PAGED_RUN"] = os.environ["MLX_PAGED_RUN"].replace(sys.prefix, "/another")
    code = "import tool; print(tool.maker())"
    print(subprocess.check_output([sys.executable, "-c", code], text=True), end="")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs Python in a folder with tool.py and an own sitecustomize.py."""

    def python(*arguments: str, tool: str = REPORT) -> subprocess.CompletedProcess:
        (tmp_path / "tool.py").write_text(tool)
        command = [sys.executable, *arguments]
        return subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT)

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "own"), ROOT]))
    monkeypatch.chdir(tmp_path)
    return python


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command on PATH that runs tool.py."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "tool-command").write_text(f"#!{sys.executable}\n{REPORT}")
    (folder / "tool-command").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return str(folder / "tool-command")


@pytest.mark.slow
@pytest.mark.parametrize("program", [["tool.py"], ["-m", "tool"]], ids=["script", "module"])
def test_a_program_sees_and_prints_what_it_does_alone(program, run):
    arguments = [*program, MODEL, "--block-size", "-m", "--", "x y", ""]
    alone = run("-O", *arguments)
    paged = run("-O", *RUN, "--block-size", "8", "--kv-memory=0.5", *arguments)
    assert alone.returncode == paged.returncode == 7
    assert len(alone.stdout) > 200 and paged.stdout == alone.stdout
    assert THEIRS in alone.stderr and OURS in paged.stderr


@pytest.mark.slow
def test_a_command_on_the_path_runs_as_alone(run, command):
    alone, paged = run(command, MODEL, "-m"), run(*RUN, "tool-command", MODEL, "-m")
    assert alone.returncode == paged.returncode == 7
    assert len(alone.stdout) > 200 and paged.stdout == alone.stdout
    assert THEIRS in alone.stderr and OURS in paged.stderr


@pytest.mark.slow
def test_a_command_goes_before_a_folder_and_a_folder_is_a_script(run, tmp_path):
    for name in ("mlx_lm.generate", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text("import sys; sys.exit(5)")
    assert run(*RUN, "folder").returncode == 5
    assert "usage: mlx_lm.generate" in run(*RUN, "mlx_lm.generate", "-h").stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "mlx_lm", "generate"], ["mlx_lm.generate"]], ids=str)
def test_mlx_lms_command_prints_the_same(program, run):
    flags = ["--model", MODEL, "--prompt", "def main():", "--max-tokens", "24", "--verbose", "F"]
    alone = run("-m", "mlx_lm", "generate", *flags)
    paged = run(*RUN, *program, *flags)
    assert alone.returncode == paged.returncode == 0
    assert len(alone.stdout) > 20 and paged.stdout == alone.stdout
    assert paged.stderr == alone.stderr.replace(THEIRS, OURS) != alone.stderr


@pytest.mark.slow
def test_options_reach_the_program(run):
    tool = "from mlx_lm.models.cache import make_prompt_cache as make\nimport mlx_lm, sys\n"
    tool += "pool = make(mlx_lm.load(sys.argv[1])[0])[0].layer.pool\n"
    tool += "print(pool.block_size)\n"
    assert run(*RUN, "--block-size", "8", "tool.py", MODEL, tool=tool).stdout == "8\n"


@pytest.mark.slow
def test_child_processes_are_patched_too(run):
    """By spawn and by subprocess; not if they do not import mlx-lm or are another Python."""
    lines = run(*RUN, "tool.py", tool=CHILD).stdout.splitlines()
    ours, theirs = (False, "mlx_paged.drop_in.patch"), (False, "mlx_lm.models.cache")
    assert lines == [str(ours), str(ours), "False", str(theirs)]


@pytest.mark.slow
def test_an_import_of_this_package_first_patches_too(run):
    tool = "import mlx_paged, mlx_lm.models.cache as c\nprint(c.make_prompt_cache.__module__)"
    assert run(*RUN, "tool.py", tool=tool).stdout == "mlx_paged.drop_in.patch\n"


@pytest.mark.slow
def test_an_exception_ends_the_program_as_alone(run):
    tool = "def fail():\n    raise KeyError('here')\nfail()"
    alone, paged = run("tool.py", tool=tool), run(*RUN, "tool.py", tool=tool)
    assert alone.returncode == paged.returncode == 1
    assert "KeyError: 'here'" in alone.stderr and paged.stderr == alone.stderr


@pytest.mark.slow
def test_ctrl_c_reaches_the_program_alone(run, tmp_path):
    (tmp_path / "tool.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    ends = []
    for before in ([], RUN):
        command = [sys.executable, *before, "tool.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            lines = process.communicate(timeout=TIMEOUT)[1].splitlines()
            # The carets mark the statement that the signal hit.
            ends.append(([line for line in lines if "^" not in line], process.returncode))
    assert ends[0] == ends[1] and ends[0][1] == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "argument SCRIPT or COMMAND: expected a file or Python command, got ''"),
        (["no.py"], "argument SCRIPT or COMMAND: expected a file or Python command, got 'no.py'"),
        (["ls"], "argument SCRIPT or COMMAND: expected a file or Python command, got 'ls'"),
        (["-m"], "argument -m: expected a Python module, got ''"),
        (
            ["-m", "mlx_vlm.generate"],
            "mlx_vlm has caches of its own, to which the patch does nothing",
        ),
        (["mlx_vlm.generate"], "mlx_vlm has caches of its own, to which the patch does nothing"),
        (["-m", "mlx_lm.nothing"], "argument -m: expected a .* module, got 'mlx_lm.nothing'"),
        (["--block-size", "0", "x"], "argument --block-size: expected a whole .*, got '0'"),
        (["--kv-memory=x", "x"], "argument --kv-memory: expected a number of GB.*, got 'x'"),
        (
            ["--kv-memory", "1e6", "tool.py"],
            "kv_memory is 10+ bytes .1000000.000 GB.: expected at most .*",
        ),
        (["--blocks", "8", "tool.py"], r"unrecognized arguments: --blocks 8 .*--block-size.*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(arguments, message, run):
    done = run(*RUN, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.removesuffix(f"{THEIRS}\n")  # from this test's sitecustomize.py
    assert re.fullmatch(rf"mlx_paged\.run: error: .*{message}\n", line)


@pytest.mark.slow
def test_a_python_that_ignores_its_environment_is_refused():
    command = [sys.executable, "-E", *RUN, "-m", "json.tool"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("mlx_paged.run: error: python got -E, -I or -S: expected none")
