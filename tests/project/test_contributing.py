"""CONTRIBUTING.md, the tasks of nox and the hooks of pre-commit name what is there."""

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TASKS = {
    node.name: node
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef)
}
ENTRIES = re.findall(r"^ *entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)


def test_every_task_is_documented():
    assert set(re.findall(r"nox -s (\w+)", TEXT)) == set(TASKS)
    assert all(ast.get_docstring(task) for task in TASKS.values())


@pytest.mark.parametrize("name", TASKS)
def test_modules_that_a_task_runs_are_there(name):
    words = [node.value for node in ast.walk(TASKS[name]) if isinstance(node, ast.Constant)]
    modules = [word for word in words if re.fullmatch(r"(bench|scripts)\.[\w.]+", str(word))]
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_hooks_are_programs_and_tests_of_the_clone():
    """A hook that came from another repository would need a network."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"repo: (.*)", text)) == {"local"}
    assert set(re.findall(r"language: (.*)", text)) == {"system"}
    for entry in ENTRIES:
        program, *words = shlex.split(entry)
        assert program.startswith(".venv/bin/")
        for word in words:
            assert (ROOT / word).exists() or not word.startswith("tests/"), word


def test_the_paths_that_the_text_names_exist():
    for span in re.findall(r"`([\w./]+/[\w./]*)`", TEXT):
        if span.startswith(".venv/") or "ROOM" in span:
            continue
        roots = (ROOT, ROOT / "mlx_paged")
        assert any((root / span).exists() for root in roots), span
