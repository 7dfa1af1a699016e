"""A live server and a client for it, shared by a module's tests."""

import pytest

from tests.support.commands.server_harness import client, live


@pytest.fixture(scope="module")
def server(request):
    """It has the flags that the module names as FLAGS."""
    with live(*getattr(request.module, "FLAGS", ("--max-queue", "256"))) as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(server):
    with client(server) as made:
        yield made
