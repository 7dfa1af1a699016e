"""Messages of errors have names that a user knows: public calls, their arguments, flags."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

import mlx_paged

ROOT = Path(__file__).resolve().parents[2]
CALLER = ("op", "caller", "where")
"""Names of the parameters that hold the name of the public call, in functions that check."""
PRIVATE = re.compile(r"(?<![\w.*/`'\"])_[a-z]\w*")


def public_names() -> set[str]:
    """Exported names, methods of exported classes and of mlx-lm's caches, and mlx-lm itself."""
    exported = [getattr(mlx_paged, name) for name in mlx_paged.__all__]
    classes = [each for each in exported if isinstance(each, type)]
    classes += [KVCache, RotatingKVCache, BatchKVCache, BatchRotatingKVCache]
    methods = {name for each in classes for name in dir(each) if not name.startswith("_")}
    return {*mlx_paged.__all__, *methods, "load_prompt_cache", "mlx-lm"}


@pytest.fixture(scope="module", autouse=True)
def forgotten_trees() -> Iterator[None]:
    """Half a million nodes, which would slow every later collection of Python's."""
    yield
    trees.cache_clear()


@cache
def trees() -> dict[str, ast.Module]:
    """All modules of the package, by their names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted((ROOT / "mlx_paged").rglob("*.py"))
    }


def texts(node: ast.AST) -> Iterator[str]:
    """String constants in a node, those of f-strings joined over their values."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@cache
def checkers() -> dict[tuple[str, str], int]:
    """Functions that take the name of the public call, by module and name, and the place of this
    argument."""
    found = {}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in node.args.args if each.arg != "self"]
                for place in (names.index(name) for name in CALLER if name in names):
                    found[module, node.name] = place
    return found


def known_checkers(module: str) -> dict[str, int]:
    """The :func:`checkers` that a module defines or imports, by their names there."""
    own = {name: place for (home, name), place in checkers().items() if home == module}
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom):
            taken = {each.asname or each.name: (node.module, each.name) for each in node.names}
            own |= {n: checkers()[home] for n, home in taken.items() if home in checkers()}
    return own


def raised() -> Iterator[tuple[str, str]]:
    """Each text in a `raise` statement, with its place."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                for text in texts(node.exc):
                    yield f"{path}:{node.lineno}", text


def test_no_raised_message_has_a_private_name():
    found = [(place, text) for place, text in raised() if PRIVATE.search(text) or "[_" in text]
    assert found == []
    assert len([*raised()]) > 300


def test_the_name_at_the_head_of_a_message_is_public():
    """``[name] ...`` in a raised text, and the names that are given to functions that check."""
    public = public_names()
    heads = [
        (place, name) for place, text in raised() for name in re.findall(r"^\[([\w-]+)\] ", text)
    ]
    for path, tree in trees().items():
        places = known_checkers(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                given = node.args[places[name] :][:1] if name in places else []
                heads += [(f"{path}:{node.lineno}", text) for each in given for text in texts(each)]
    assert len(heads) > 100
    assert [(place, name) for place, name in heads if name not in public] == []


def test_a_message_of_threads_names_the_public_call():
    """A method whose name may come into a message is public, or gives another name."""
    private = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id == "exclusive"
    ]
    assert private == []


def test_no_module_writes_to_the_root_logger():
    """`logging.warning` gives the root logger a handler, and lines begin with ``WARNING:root:``."""
    writers = {"debug", "info", "warning", "error", "critical", "exception", "log"}
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in writers
        if isinstance(node.value, ast.Name) and node.value.id == "logging"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "is_private"),
    [
        ("[Engine] _complete is called", True),
        ("seq_id 3 is in use", False),
        ("expected _ext", True),
        ("kv_memory is 3 bytes", False),
    ],
)
def test_private_names_are_found(text, is_private):
    assert bool(PRIVATE.search(text)) == is_private
