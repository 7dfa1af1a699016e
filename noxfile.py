"""Tasks for `nox -s NAME`; `nox -l` lists them. They run in the environment that has nox."""

import subprocess
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "test"]

PYTHON = sys.executable


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types of Python, and the format of C++."""
    session.run(PYTHON, "-m", "ruff", "check", ".")
    session.run(PYTHON, "-m", "ruff", "format", "--check", ".")
    session.run(PYTHON, "-m", "mypy")
    listed = subprocess.check_output(["git", "ls-files", "*.cpp", "*.h"], text=True)
    clang_format = str(Path(PYTHON).with_name("clang-format"))
    session.log("clang-format of all C++ files")
    session.run(clang_format, "--dry-run", "--Werror", *listed.splitlines(), log=False)


@nox.session
def test(session: nox.Session) -> None:
    """Run the sample of all tests; arguments after -- go to pytest."""
    session.run(PYTHON, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the host's part of a step, then the reference workload beside mlx-lm."""
    session.run(PYTHON, "-m", "bench.host_cost")
    engines = ("--engines", "mlx_paged,mlx_lm")
    session.run(
        *(PYTHON, "-m", "bench.serving", "--preset", "reference", *engines, "--rounds", "3"),
        *session.posargs,
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of the documents in build/site; a link that leads nowhere is an error."""
    session.run(PYTHON, "-m", "mkdocs", "build", *session.posargs)


@nox.session
def metal(session: nox.Session) -> None:
    """Check the Metal sources and launches; needs clang 19, but no Mac."""
    session.run(PYTHON, "-m", "scripts.metal.check", *session.posargs)
