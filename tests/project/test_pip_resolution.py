"""pip chooses an mlx-lm that fits the pinned mlx: tried on a local index with empty packages."""

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def add(folder: Path, name: str, version: str, *needs: str, extras: tuple[str, ...] = ()) -> None:
    """Write a wheel that has metadata alone."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {each}" for each in extras]
    lines += [f"Requires-Dist: {each}" for each in needs]
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def resolved(folder: Path, *asked: str) -> dict[str, str]:
    """What pip would install from a folder, by name."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--no-index", "--find-links", str(folder), "--report", "-", *asked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {}
    found = (each["metadata"] for each in json.loads(done.stdout)["install"])
    return {each["name"]: each["version"] for each in found}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    for version in ("0.32.4", "0.32.5", "0.33.0"):
        add(folder, "mlx", version, extras=("cpu",))
    for version, oldest in (("0.32.1", "0.32.3"), ("0.32.2", "0.32.4"), ("0.32.3", "0.32.5")):
        add(folder, "mlx-lm", version, f"mlx>={oldest}")
    add(folder, "mlx-lm", "0.33.0", "mlx>=0.32.4")
    for name in ("numpy", "tqdm"):
        add(folder, name, "2.0")
    add(folder, "mlx-paged", PROJECT["version"], *PROJECT["dependencies"])
    return folder


def test_pip_chooses_the_newest_mlx_lm_that_fits(index):
    found = resolved(index, "mlx-paged")
    assert (found["mlx"], found["mlx-lm"]) == ("0.32.4", "0.32.2")


@pytest.mark.slow
def test_pip_refuses_what_does_not_fit(index):
    assert resolved(index, "mlx-lm")["mlx"] == "0.33.0", "the index has newer ones"
    assert resolved(index, "mlx-paged", "mlx-lm==0.32.3") == {}
