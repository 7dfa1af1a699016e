"""Which cases of the tests run: the sample, and the others of which a commit chooses some."""

import os
import subprocess
import sys

import pytest

CASES = """
import pytest
@pytest.mark.parametrize("number", range(13))
def test_many(number): pass
@pytest.mark.parametrize("number", range(5))
def test_five(number): pass
@pytest.mark.parametrize("number", range(4))
def test_few(number): pass
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(3))
def test_sampled(number): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.heavy
def test_heavy(): pass
"""
ALL = {"test_many": 13, "test_five": 5, "test_few": 4, "test_sampled": 3}
ALL |= {"test_slow": 1, "test_heavy": 1}
SAMPLE = {"test_many": 2, "test_five": 1, "test_few": 4, "test_sampled": 1}
OTHERS = {"test_many": 11, "test_five": 4, "test_sampled": 2, "test_slow": 1, "test_heavy": 1}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], SAMPLE),
        (["--cases", "all"], ALL),
        (["--cases", "others"], OTHERS),
        (["--cases", "others", "--one-in", "10000000"], {}),
        (["--cases", "others", "--one-in", "20"], {"test_heavy": 1}),
    ],
    ids=["sample", "all", "others", "few of the others", "all heavy ones"],
)
def test_cases_that_run(flags, expected, pytestconfig, tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES)
    conftest = pytestconfig.rootpath / "tests" / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    command += ["--rootdir", ".", "--seed", "b", *flags, "."]
    environment = os.environ | {"PYTHONPATH": str(pytestconfig.rootpath)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    counts = {name: sum(f"::{name}" in line for line in found) for name in ALL}
    assert {name: count for name, count in counts.items() if count} == expected, done.stdout
