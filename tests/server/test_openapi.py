"""/openapi.json: a valid OpenAPI document, whose schemas agree with what the server takes."""

import json
import re
from argparse import Namespace
from dataclasses import fields
from types import SimpleNamespace

import pytest

from mlx_paged.protocol import openapi
from mlx_paged.protocol.fields import API_OF, BOTH, LABELS, all_fields, treatment
from mlx_paged.sampling_params import SamplingParams, is_within
from mlx_paged.server import app as server_app
from mlx_paged.server import flags as server_flags

jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")

VALUES = [
    *(True, False, 0, 1, -1, 2, 20, 21, 2**31 - 1, 2**31, -(2**31), -(2**63), 2**64, 0.5, -0.5),
    *(1.5, 100, 100.5, "", "x", "background", "none", [], [1], [-1], [2**31], ["a"], [""], [{}]),
    *({}, {"a": 1}, {"a": "b"}, {"include_usage": True}, {"retain": "pin"}, {"retain": 5}),
    *({"retain": -1}, {"retain": "x"}, {"type": "text"}, {"type": "x"}, [True], ["a"] * 257),
]  # fmt: skip
WIDER = {"tool_choice", "stop", "stream_options", "model"}
"""Fields whose schema says less than the server checks: sums of lengths, forms of objects."""
RANGES = {each.name: each.metadata.get("range") for each in fields(SamplingParams)}


def document(*flags):
    """What a server with these flags serves. The app needs no model to describe itself."""
    args = server_flags.parse([*flags])
    metrics = SimpleNamespace(text=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "ServerMetrics", lambda models: metrics)
        made = server_app.make_app(args, Namespace())
    return json.loads(made.state.openapi.body), made


def is_valid(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_the_document_is_valid():
    spec = pytest.importorskip("openapi_spec_validator", reason="openapi-spec-validator is missing")
    for flags in ((), ("--api-key", "k"), ("--adapters-dir", ".")):
        spec.OpenAPIV31SpecValidator(document(*flags)[0]).validate()


def test_mistakes_are_found():
    spec = pytest.importorskip("openapi_spec_validator", reason="openapi-spec-validator is missing")
    for break_it in (
        lambda found: found["info"].pop("version"),
        lambda found: found["paths"]["/health"]["get"]["responses"]["200"].pop("description"),
        lambda found: found["components"]["schemas"]["chat"].update(type="objects"),
    ):
        found, _ = document()
        break_it(found)
        assert any(spec.OpenAPIV31SpecValidator(found).iter_errors())


def test_references_lead_to_schemas():
    found, _ = document()
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found))
    assert names and set(names) == set(found["components"]["schemas"]) == set(API_OF)


def test_every_route_is_described():
    found, app = document("--adapters-dir", ".")
    routes = {
        (route.path, method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if "{" not in route.path
    }
    described = {(path, method) for path, item in found["paths"].items() for method in item}
    assert described == routes
    assert "/v1/load_lora_adapter" not in document()[0]["paths"]


def test_keys_are_described_as_they_are_asked_for():
    without, _ = document()
    assert "security" not in without
    with_keys, _ = document("--api-key", "k")
    assert with_keys["security"] == [{"bearer": []}, {"header": []}]
    is_open = {
        path
        for path, item in with_keys["paths"].items()
        for operation in item.values()
        if operation.get("security") == []
    }
    assert is_open == server_app.OPEN
    assert "k" not in json.dumps(with_keys).split('"')


@pytest.mark.parametrize("api", API_OF)
def test_a_schema_has_the_fields_of_the_tables(api):
    schema = openapi.body_schema(api)
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in all_fields():
        what, found = treatment(api, name), schema["properties"].get(name)
        if what == "obeyed":
            assert found["anyOf"][1] == {"type": "null"}, name
        elif what.startswith("refused"):
            assert None in found["enum"], name
        elif name in LABELS:
            assert is_valid(found, [1]), name
    assert set(schema["properties"]) <= all_fields()
    assert schema["required"] == [openapi.REQUIRED[api]]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_schemas_agree_with_the_checks(api):
    """A value that the server takes is valid, and one that it refuses is not, unless the schema
    says less."""
    rules, properties = BOTH | API_OF[api], openapi.body_schema(api)["properties"]
    checks = {name: rule[1] for name, rule in rules.items()}
    checks |= {name: check[0] for name, check in RANGES.items() if check and name not in rules}
    compared = 0
    for name in checks.keys() & properties.keys():
        if treatment(api, name) != "obeyed":
            continue
        for value in VALUES:
            takes = checks[name](value)
            if name in openapi.RANGES:  # what requests may have instead
                is_kind = name != "seed" or type(value) is int
                takes = is_kind and is_within(value, *openapi.RANGES[name])
            says = value is None or is_valid(properties[name]["anyOf"][0], value)
            assert says or not takes, (name, value)
            assert takes or not says or name in WIDER, (name, value)
            compared += 1
    assert compared > 500
