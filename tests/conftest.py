"""Fixtures of all tests, and which cases of the long matrices run."""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import wraps
from random import Random

# Whatever the environment says, a process leaves the compiled files of what it imports to the many
# others that tests start: the test command installs packages without compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if sys.platform == "darwin":
    # Products of float32 keep their 24 bits on an M5, too. MLX reads this when it is imported.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import pytest
from hypothesis import settings

from mlx_paged.runner.model_runner import ModelRunner
from tests.support.devices import device_of_test, what_lacks

settings.register_profile("no deadline", deadline=None)  # a busy machine is no fault
settings.load_profile("no deadline")


MANY, OF_MANY = 4, 6
HEAVY_PART = 20
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("sample", "others", "all"),
        default="sample",
        help="a sample: one case in n of tests marked `sampled(n)`, none of `slow` ones; or others",
    )
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="of N tests one is run")
    parser.addoption("--seed", default="", help="chooses the tests of --one-in")


def pytest_configure() -> None:
    """Tests of Ctrl-C pass in a background job of a shell too, where SIGINT is ignored and child
    processes would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's garbage collection walks about a million objects of collected tests: not while they
    are made, and never again afterwards."""
    gc.disable()
    result = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The second worker of pytest-xdist collects the last file first: it reads the compiled files
    of one half of the tests, and the first worker those of the other half."""
    report = yield
    if isinstance(collector, pytest.Directory) and WORKER == "gw1":
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases of tests that are marked ``sampled(n)``, as `--cases` says. The sample has one
    case in n, rounded down: a test with one case is not in it, nor is one that is marked ``slow``
    or ``heavy``. Of a test without a mark that has more than `MANY` cases at most one in `OF_MANY`
    is in the sample; all are of tests of the project and of a real model.
    "others" are the cases that the sample lacks. Of these, `--one-in` N runs all cases of a test or
    none; of tests marked ``heavy`` it takes one in N / `HEAVY_PART`. A test that the command line
    names by ``::`` runs with all its cases."""
    for item in items:
        if " at 0x" in item.nodeid:  # the address differs between the workers of pytest-xdist
            raise pytest.UsageError(f"{item.nodeid}: expected an id without an address")
    if WORKER:
        items.sort(key=lambda item: item.path)  # workers must agree on the order
    wanted, one_in = config.getoption("--cases"), config.getoption("--one-in")
    if any("::" in argument for argument in config.args):
        return
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        matrices[item.nodeid.partition("[")[0]].append(item)
    kept = set[pytest.Item]()
    for name, cases in matrices.items():
        is_heavy = cases[0].get_closest_marker("heavy") is not None
        part = max(1, one_in // HEAVY_PART) if is_heavy else one_in
        if Random(config.getoption("--seed") + name).randrange(part):
            continue
        marks = [*cases[0].iter_markers("sampled")]
        if len(marks) > 1:
            raise pytest.UsageError(f"{name} is sampled twice: only the nearest mark would count")
        sample = cases
        if is_heavy or cases[0].get_closest_marker("slow"):
            sample = []
        elif marks:
            sample = Random(name).sample(cases, len(cases) // marks[0].args[0])
        elif len(cases) > MANY and not name.startswith(("tests/project/", "tests/real_model/")):
            sample = Random(name).sample(cases, max(1, len(cases) // OF_MANY))
        kept.update({"sample": sample, "others": set(cases) - set(sample), "all": cases}[wanted])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a Mac a test that is marked ``mac`` is on the GPU, every other one on the CPU."""
    if device := device_of_test(item.get_closest_marker("mac") is not None):
        mx.set_default_device(device)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip what a paravirtual GPU lacks."""
    try:
        return (yield)
    except RuntimeError as error:
        name = str(mx.device_info().get("device_name", ""))
        if reason := what_lacks(error, name):
            pytest.skip(reason)
        raise


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
