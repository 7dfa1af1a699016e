"""GitHub accepts the workflows, and what they call is there."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("check_jsonschema", reason="the package check-jsonschema is not installed")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def check(*files: Path, schema: str = "github-workflows") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += [f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_workflows_are_valid():
    done = check(*WORKFLOWS.glob("*.yml"))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_updates_of_dependencies_are_valid(tmp_path):
    file = ROOT / ".github" / "dependabot.yml"
    assert check(file, schema="dependabot").returncode == 0
    broken = tmp_path / "dependabot.yml"
    broken.write_text(file.read_text().replace("interval: weekly", "interval: often"))
    assert check(broken, schema="dependabot").returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("runs-on: macos-15", "run-on: macos-15"), ("- run: pytest -q", "- runs: pytest -q")],
)
def test_a_mistake_is_found(right, wrong, tmp_path):
    text = (WORKFLOWS / "ci.yml").read_text()
    assert right in text
    broken = tmp_path / "ci.yml"
    broken.write_text(text.replace(right, wrong))
    assert check(broken).returncode == 1


@pytest.mark.parametrize(
    ("report", "is_right"),
    [
        ({"num_wrong": 0, "checks": {"machine": {}, "kernels": {}}}, True),
        ({"num_wrong": 1, "checks": {"machine": {}, "kernels": {}}}, False),
        ({"num_wrong": 0, "checks": {}}, False),
    ],
)
def test_a_doctor_that_judged_no_kernel_fails(report, is_right, tmp_path):
    (line,) = re.findall(r'python -c "(.*doctor\.json.*)"', (WORKFLOWS / "ci.yml").read_text())
    (tmp_path / "doctor.json").write_text(json.dumps(report))
    done = subprocess.run([sys.executable, "-c", line], cwd=tmp_path)
    assert (done.returncode == 0) == is_right


def test_the_files_that_they_run_are_there():
    text = "".join(path.read_text() for path in WORKFLOWS.glob("*.yml"))
    called = set(re.findall(r"(?:\.ci/|scripts/)\S+", text))
    assert called == {".ci/run", "scripts/build_macos_wheel.sh"}
    for name in called:
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_every_python_with_a_wheel_is_audited():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    built = re.findall(r"cp3(\d+)", config["build"])
    text = (WORKFLOWS / "wheels.yml").read_text()
    (audited,) = re.findall(r"python: \[(.*)\]", text)
    assert re.findall(r"3\.(\d+)", audited) == built
