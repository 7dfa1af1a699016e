"""Whose turn a request takes under --policy fair, and which requests are of the background."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.protocol import request_body
from mlx_paged.server import app


def read(**body: Any) -> dict[str, Any]:
    fields, unknown = request_body.read({"prompt": "a"} | body, False, 16)
    assert unknown == []
    return fields


@pytest.mark.parametrize(
    ("key", "body", "share"),
    [
        (None, {}, ()),
        (None, {"user": "u"}, ("user u",)),
        (None, {"user": "u", "safety_identifier": "s"}, ("user s",)),
        (None, {"cache_salt": "x", "user": "u"}, ("salt x", "user u")),
        ("", {}, ("key ",)),
        ("alice", {"user": "u"}, ("key alice", "user u")),
        ("alice", {"cache_salt": "x", "user": "u"}, ("key alice", "salt x", "user u")),
        ("alice", {"user": ["no", "name"]}, ("key alice",)),
        ("alice", {"user": "u" * 10**6}, ("key alice", "user " + "u" * 256)),
    ],
)
def test_a_client_is_a_key_or_else_a_salt_or_else_a_user(key, body, share):
    state = {} if key is None else {"key": key}
    request: Any = SimpleNamespace(scope={"state": state})
    assert app._share(request, read(**body)) == share


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({}, 0),
        ({"priority": "background"}, "background"),
        ({"service_tier": "flex"}, "background"),
        ({"service_tier": "flex", "priority": 3}, "background"),
        ({"service_tier": "auto", "priority": 3}, 3),
    ],
)
def test_the_tier_flex_is_the_background(body, priority):
    assert read(**body)["priority"] == priority


@pytest.mark.parametrize("priority", ["low", "", 1.5, True, ["background"]])
def test_no_other_text_is_a_priority(priority):
    with pytest.raises(ValueError, match=r'priority: expected an integer .* or "background"'):
        read(priority=priority)


def test_an_asynchronous_response_is_something_else():
    with pytest.raises(ValueError, match="background: expected False"):
        read(background=True)
