"""Which cases of the tests run: the sample, and the others of which a commit chooses some."""

import os
import subprocess
import sys

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


RUNS = {
    "sample": ([], SAMPLE),
    "all": (["--cases", "all"], ALL),
    "others": (["--cases", "others"], OTHERS),
    "few of the others": (["--cases", "others", "--one-in", "10000000"], {}),
    "all heavy ones": (["--cases", "others", "--one-in", "20"], {"test_heavy": 1}),
}


def test_cases_that_run(pytestconfig, tmp_path):
    """One process collects the cases of all runs: it imports the package once. It leaves compiled
    files, which other processes of the tests then read, whatever the environment says."""
    (tmp_path / "test_cases.py").write_text(CASES)
    conftest = pytestconfig.rootpath / "tests" / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    common = ["-q", "--collect-only", "-p", "no:cacheprovider", "--rootdir", ".", "--seed", "b"]
    code = "import pytest"
    for name, (flags, _) in RUNS.items():
        code += f"\nprint('run {name}')\npytest.main({[*common, *flags, '.']})"
    environment = os.environ | {"PYTHONPATH": str(pytestconfig.rootpath)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    _, *pages = done.stdout.split("run ")
    for page, (name, (_, expected)) in zip(pages, RUNS.items(), strict=True):
        assert page.startswith(name)
        found = [line for line in page.splitlines() if "::" in line]
        counts = {test: sum(f"::{test}" in line for line in found) for test in ALL}
        assert {test: count for test, count in counts.items() if count} == expected, page
    assert [*(tmp_path / "__pycache__").glob("test_cases*.pyc")]


def test_order_of_the_second_worker(pytestconfig, tmp_path):
    """It imports the last file first, and has the tests in the order of the first worker."""
    conftest = pytestconfig.rootpath / "tests" / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    for name in ("folder/test_a", "test_b", "test_c"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("open('imported', 'a').write(__name__[-1])\ndef test(): pass\n")
    environment = os.environ | {"PYTHONPATH": str(pytestconfig.rootpath)}
    environment |= {"PYTEST_XDIST_WORKER": "gw1"}
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--rootdir", "."]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (tmp_path / "imported").read_text() == "cba"
    names = ["folder/test_a.py::test", "test_b.py::test", "test_c.py::test"]
    assert done.stdout.split()[: len(names)] == names
