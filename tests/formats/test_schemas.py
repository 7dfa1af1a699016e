"""What schemas of clients say of arguments is read in bounded time, whatever they are."""

import pytest

from mlx_paged.formats import schemas
from mlx_paged.formats.schemas import choices_of, types_of, value_of


@pytest.mark.parametrize("digits", [1, 17, 18, 5000])
def test_an_index_of_a_reference_may_have_any_length(digits):
    root = {"x": [{"type": "integer"}] * 10}
    schema = {"$ref": f"#/x/{'9' * digits}"}
    assert types_of(schema, root) == (frozenset({"integer"}) if digits == 1 else None)
    assert value_of("1", schema, root) == ("1" if digits == 1 else '"1"')
    zeros = {"$ref": f"#/x/{'0' * digits}"}  # Python reads no such number, however small it is
    assert types_of(zeros, root) == (frozenset({"integer"}) if digits <= 18 else None)


def test_constants_that_many_references_point_to_are_read_once():
    root = {"x": {"enum": [*range(1000)]}}
    schema = {"anyOf": [{"$ref": "#/x"}] * 90}
    assert choices_of(schema, root) == root["x"]["enum"]


def test_types_of_constants_are_known_without_their_json(monkeypatch):
    monkeypatch.setattr(schemas, "written", lambda value: pytest.fail(f"{value} was written"))
    constants = {
        **{"string": "1", "integer": 1, "number": 1e30, "boolean": True},
        **{"null": None, "object": {"a": 1}, "array": [1]},
    }
    for name, value in constants.items():
        assert types_of({"enum": [value]}, {}) == types_of({"const": value}, {}) == {name}
    assert types_of({"enum": [*constants.values()]}, {}) == constants.keys()
