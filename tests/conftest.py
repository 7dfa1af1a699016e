"""Fixtures of all tests."""

from collections.abc import Iterator
from functools import wraps

import pytest

from mlx_paged.runner.model_runner import ModelRunner


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
