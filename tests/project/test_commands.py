"""``python -m mlx_paged`` lists the commands and runs them."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import mlx_paged
from mlx_paged import __main__ as overview
from tests.support import TIMEOUT
from tests.support.documents import ROOT


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of the command in this process."""
    for name in ("argv", "orig_argv"):
        monkeypatch.setattr(sys, name, ["mlx_paged", *arguments])
    try:
        overview.main()
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def test_every_command_is_listed_and_exists(monkeypatch, capsys):
    found = Path(overview.__file__).parent.glob("*/__main__.py")
    commands = overview.all_commands()
    modules = {each.module for each in commands.values()}
    folders = {f"mlx_paged.{path.parent.name}" for path in found}
    assert modules == folders | {"mlx_paged.run", ""}
    assert all(find_spec(name) for name in modules - {""})
    assert called(monkeypatch) == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out and each.text in out for name, each in commands.items())


def test_the_version_is_told(monkeypatch, capsys):
    assert called(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"mlx_paged {mlx_paged.__version__}\n"


def test_an_unknown_command_is_one_line(monkeypatch, capsys):
    assert called(monkeypatch, "generat", "-p", "x") == 2
    err = capsys.readouterr().err
    assert err.startswith("mlx_paged: error: argument COMMAND: invalid choice: 'generat'")
    assert err.endswith(" (did you mean generate?)\n")
    assert err.count("\n") == 1


def test_every_bench_is_a_command(monkeypatch, capsys):
    files = [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*/__main__.py")]
    found = [path for path in files if '__name__ == "__main__"' in path.read_text()]
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in found}
    assert {*overview.BENCHES} == names
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "bench.memory", raising=False)
    assert called(monkeypatch, "bench", "memory", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: bench.memory ")
    assert called(monkeypatch, "bench", "speed") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert called(monkeypatch, "bench") == 2
    assert capsys.readouterr().err.endswith(f" required: {'|'.join(overview.BENCHES)}\n")


def test_ctrl_c_at_any_time_is_a_status(monkeypatch):
    """While a command is imported, too. The server's status after Ctrl-C is 0."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("runpy.run_module", interrupted)
    assert called(monkeypatch, "generate", "-p", "x") == 130
    assert called(monkeypatch, "run", "program.py") == 130
    assert called(monkeypatch, "server") == 0


def test_the_console_script_is_the_same_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mlx_paged": f"{overview.__name__}:{overview.main.__name__}"}


def test_an_editable_install_adds_the_clone_to_the_path():
    """Else a script beside a clone named mlx_paged imports the clone's folder, which is no package:
    setuptools' finder is asked after the folder of the script. Setuptools adds a path where this
    table names the clone's folder alone."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}


@pytest.mark.slow
def test_a_command_gets_its_own_arguments_and_pythons_flags(tmp_path):
    """`run` passes the flags of Python on to the program."""
    script = tmp_path / "run.py"
    script.write_text("import sys\nprint(sys.argv[1:], sys.flags.utf8_mode, __name__)\n")
    command = [sys.executable, "-X", "utf8", "-m", "mlx_paged", "run", script, "run", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.stdout, done.stderr) == ("['run', '-h'] 1 __main__\n", "")
