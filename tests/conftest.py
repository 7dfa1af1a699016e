"""Fixtures of all tests, and which cases of the long matrices run."""

import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import wraps
from random import Random

import pytest

from mlx_paged.runner.model_runner import ModelRunner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("sample", "others", "all"),
        default="sample",
        help="of tests marked `sampled(n)`: one case in n, the others, or all",
    )


def pytest_configure() -> None:
    """Tests of Ctrl-C pass in a background job of a shell too, where SIGINT is ignored and child
    processes would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases of tests that are marked ``sampled(n)``, as `--cases` says. The sample has one
    case in n, rounded down: a test with one case is not in it. "others" are the cases that the
    sample lacks. A test that the command line names by ``::`` runs with all its cases."""
    wanted = config.getoption("--cases")
    if wanted == "all" or any("::" in argument for argument in config.args):
        return
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        matrices[item.nodeid.partition("[")[0]].append(item)
    kept = set[pytest.Item]()
    for name, cases in matrices.items():
        mark = cases[0].get_closest_marker("sampled")
        sample = cases
        if mark is not None:
            sample = Random(name).sample(cases, len(cases) // mark.args[0])
        if wanted == "sample":
            kept.update(sample)
        else:
            kept.update(set(cases) - set(sample))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session", autouse=True)
def decodes_are_compiled_on_request() -> Iterator[None]:
    """Whether compiled decodes are faster depends on the load of the machine. A test must
    not depend on it, so only ``compile=True`` compiles them."""
    original = ModelRunner.compile_decodes

    @wraps(original)
    def on_request(self: ModelRunner, wanted: bool | None, max_rows: int):
        return original(self, bool(wanted), max_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "compile_decodes", on_request)
        yield
