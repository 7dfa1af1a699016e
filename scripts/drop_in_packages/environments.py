"""A fresh environment for each package: the tested mlx and mlx-lm, the package, this project."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from mlx_paged.arguments import TESTED_MLX_LM
from scripts.drop_in_packages.packages import Package

ROOT = Path(__file__).resolve().parents[2]
PINS = (f"mlx=={importlib.metadata.version('mlx')}", f"mlx-lm=={TESTED_MLX_LM[-1]}")
BASE = (f"mlx[cpu]=={importlib.metadata.version('mlx')}", PINS[1])
REQUIREMENTS = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
found = map(Requirement, importlib.metadata.requires(sys.argv[1]) or [])
print(json.dumps([str(r) for r in found if r.name.replace("_", "-") not in ("mlx", "mlx-lm")
                  and (not r.marker or r.marker.evaluate({"extra": ""}))]))
"""


class InstallError(RuntimeError):
    """pip refused; the message is its last error."""


def build_wheel(folder: Path) -> Path:
    """This project's wheel. A wheel that is there is used again."""
    if not (found := sorted(folder.glob("mlx_paged-*.whl"))):
        pip(Path(sys.executable), "wheel", "--no-deps", "-w", folder, ROOT)
        found = sorted(folder.glob("mlx_paged-*.whl"))
    return found[-1]


class Environment:
    """An environment; `refusal` says why pip refused the package's own requirement of mlx-lm."""

    def __init__(self, folder: Path, name: str, package: Package, wheel: Path) -> None:
        self.folder = folder.resolve()  # as scripts name it: child processes compare it
        self.name = name
        self.python = self.folder / "bin" / "python"
        self.refusal = ""
        if not (folder / "complete").exists():
            self._install(package)
            (folder / "complete").write_text(self.refusal)
        self.refusal = (folder / "complete").read_text().strip()
        pip(self.python, "install", "--no-deps", "--force-reinstall", wheel)

    def _install(self, package: Package) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, with_pip=True)
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(PINS))
        install: tuple[str | Path, ...] = (
            "install",
            "-c",
            constraints,
            "packaging",
            *BASE,
            *package.extra,
        )
        if not package.forced:
            pip(self.python, *install, self.name)
            return
        wanted = f"{self.name}=={package.forced}"
        try:
            pip(self.python, *install, "--dry-run", wanted)
        except InstallError as error:
            self.refusal = str(error)
        pip(self.python, *install)
        pip(self.python, "install", "--no-deps", wanted)
        needed = json.loads(run(self.python, "-c", REQUIREMENTS, self.name))
        pip(self.python, *install, *needed)

    def version(self) -> str:
        code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
        return run(self.python, "-c", code, self.name).strip()


def pip(python: Path, *arguments: str | Path) -> None:
    command = [python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if "ERROR" in line or "requires" in line
        ]
        raise InstallError(" ".join(errors)[:300] or done.stderr[-300:])


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
