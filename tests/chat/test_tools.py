"""Tools as chat templates read them."""

import pytest

from mlx_paged.chat.tools import completed

EMPTY = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, EMPTY),
        ({"parameters": None}, EMPTY),
        ({"parameters": {}}, EMPTY),
        ({"parameters": []}, EMPTY),
        ({"parameters": {"type": "object"}}, EMPTY),
        ({"parameters": {"type": "object", "properties": None}}, EMPTY),
        ({"parameters": {"properties": {"a": {}}}}, {"properties": {"a": {}}}),
        ({"parameters": {"$ref": "#/x"}}, {"$ref": "#/x", "properties": {}}),
    ],
    ids=str,
)
def test_tools_have_parameters_with_properties(given, expected):
    (tool,) = completed([{"type": "function", "function": {"name": "f"} | given}])
    assert tool["function"]["parameters"] == expected


@pytest.mark.parametrize("tool", ["f", {"name": "f"}, {"function": "f"}], ids=str)
def test_other_tools_stay_as_they_are(tool):
    assert completed([tool]) == [tool]
