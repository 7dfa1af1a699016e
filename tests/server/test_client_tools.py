"""Custom tools and namespaces of the Responses API, read by the types of OpenAI's client."""

import json
import re

import pytest
from openai.types import responses as types
from pydantic import TypeAdapter

from mlx_paged.protocol import client_tools
from tests.support.commands.scripted_models import CHANNELS, scripted, template
from tests.support.commands.server_harness import exchange, post

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = tuple(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
)
EVENT = TypeAdapter(types.ResponseStreamEvent)
PATCH = '*** Begin Patch\n+\tif x == "<tool_call>":\n\\n é\n*** End Patch\n'
LARK = 'start: "<<" word+ ">>" LF?\nword: /[a-c"\\\\]{1,2}/ "\\n"\n%import common.LF'
TOOLS = [
    {"type": "custom", "name": "patch", "description": "Patches a file."},
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}},
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [
            {"type": "function", "name": "find", "parameters": {"type": "object"}},
            {"type": "custom", "name": "note"},
        ],
    },
]
CALLS = {
    "json_tools": lambda name, given: (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"
    ),
    "qwen3_coder": lambda name, given: (
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
    ),
    "harmony": lambda name, given: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(given)}<|end|><|start|>assistant"
    ),
}


@pytest.fixture(scope="module", params=CALLS)
def made(request):
    """A server, and how its model writes a call."""
    family = request.param
    marks = (CHANNELS, HARMONY) if family == "harmony" else (template(family), TAGS)
    with scripted(*marks) as server:
        yield server, CALLS[family]


def parsed(raw):
    """The events of a stream, each as its type."""
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [EVENT.validate_python(json.loads(line)) for line in lines]


def answers(server, body):
    """The output of an answer, whole and streamed, and the events of the latter."""
    status, _, whole = post(server, body, "/v1/responses")
    assert status == 200, whole
    types.Response.model_validate(whole)
    given = json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
    _, _, raw = exchange(server, "POST", "/v1/responses", *given)
    events = parsed(raw)
    return whole["output"], events[-1].response.output, events


def test_calls_have_the_kinds_and_names_of_their_tools(made):
    server, call = made
    said = call("patch", {"input": PATCH}) + call("f", {})
    said += call("crm__find", {"q": "x"}) + call("crm__note", {"input": "ok"})
    said = said.removesuffix("<|start|>assistant")
    body = {"input": "hi", "max_output_tokens": 1500, "tools": TOOLS, "metadata": {"script": said}}
    whole, streamed, events = answers(server, body)
    assert [type(item) for item in streamed] == [
        *(types.ResponseCustomToolCall, types.ResponseFunctionToolCall),
        *(types.ResponseFunctionToolCall, types.ResponseCustomToolCall),
    ]
    named = [(item.name, item.namespace) for item in streamed]
    assert named == [("patch", None), ("f", None), ("find", "crm"), ("note", "crm")]
    assert (streamed[0].input, streamed[3].input) == (PATCH, "ok")
    assert json.loads(streamed[2].arguments) == {"q": "x"}
    for one, other in zip(whole, streamed, strict=True):
        ids = {"id", "call_id"}
        told = other.to_dict()
        assert {k: v for k, v in one.items() if k not in ids} == {
            k: v for k, v in told.items() if k not in ids
        }
    for name, item in (
        ("custom_tool_call_input", "input"),
        ("function_call_arguments", "arguments"),
    ):
        deltas = [e.delta for e in events if e.type == f"response.{name}.delta"]
        done = [getattr(e, item) for e in events if e.type == f"response.{name}.done"]
        assert deltas == done == [getattr(x, item) for x in streamed if hasattr(x, item)]
    names = [e.name for e in events if e.type == "response.function_call_arguments.done"]
    assert names == ["f", "find"]
    again = [{"role": "user", "content": "hi"}, *whole]
    again += [
        {"type": f"{x['type']}_output", "call_id": x["call_id"], "output": "done"} for x in whole
    ]
    end = "<|channel|>final<|message|>ok" if "<|start|>" in call("f", {}) else "ok"
    body |= {"input": again, "metadata": {"script": end}}
    assert answers(server, body)[0][-1]["content"][0]["text"] == "ok"


def test_other_arguments_of_a_custom_tool_are_its_text(made):
    server, call = made
    said = call("patch", {"diff": "x"}).removesuffix("<|start|>assistant")
    body = {"input": "hi", "max_output_tokens": 600, "tools": TOOLS, "metadata": {"script": said}}
    (item,), _, _ = answers(server, body)
    assert json.loads(item["input"]) == {"diff": "x"}


@pytest.mark.parametrize(
    ("syntax", "definition", "expected"),
    [
        ("lark", LARK, r'<<([a-c"\\]{1,2}\n)+>>\n?'),
        ("regex", r'[a-b"/\\]\n(x|y)\/{2}', r'[a-b"/\\]\n(x|y)/{2}'),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
def test_a_grammar_is_obeyed_where_a_tool_must_be_called(
    made, syntax, definition, expected, choice
):
    server, _ = made
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool = {"type": "custom", "name": "patch", "format": grammar}
    body = {"input": "hi", "max_output_tokens": 3000, "tools": [tool], "tool_choice": choice}
    body |= {"temperature": 1.0, "parallel_tool_calls": False}
    found = 0
    for seed in range(4):
        status, _, answer = post(server, body | {"seed": seed}, "/v1/responses")
        assert status == 200, answer
        calls = [item for item in answer["output"] if item["type"] == "custom_tool_call"]
        assert calls or answer["status"] == "incomplete"
        assert all(re.fullmatch(expected, call["input"]) for call in calls), calls
        found += len(calls)
    assert found


def test_a_grammar_that_is_no_expression_is_refused_in_json():
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    tool = {"type": "custom", "name": "p", "format": grammar}
    body = {"input": "hi", "max_output_tokens": 400, "tools": [tool], "tool_choice": "required"}
    with scripted(template("json_tools"), TAGS) as server:
        status, _, answer = post(server, body, "/v1/responses")
        assert (status, answer["error"]["param"]) == (400, "tools"), answer
        assert "contains itself" in answer["error"]["message"]
    with scripted(template("qwen3_coder"), TAGS) as server:
        _, _, answer = post(server, body | {"temperature": 1.0, "seed": 2}, "/v1/responses")
        for item in answer["output"]:
            if item["type"] == "custom_tool_call":
                assert re.fullmatch(r"\(+\)+", item["input"])


CUSTOM = {"type": "custom", "name": "p"}
USER = {"role": "user", "content": "a"}


def with_format(**given):
    return {"tools": [CUSTOM | {"format": given}]}


def with_item(**item):
    return {"input": [USER, item]}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tools": [CUSTOM | {"name": 7}]}, "tools[0].name"),
        ({"tools": [CUSTOM | {"name": ""}]}, "tools[0].name"),
        ({"tools": [CUSTOM | {"description": {}}]}, "tools[0].description"),
        ({"tools": [CUSTOM | {"format": "lark"}]}, "tools[0].format"),
        (with_format(type="json"), "tools[0].format.type"),
        (with_format(type=[]), "tools[0].format.type"),
        (with_format(type="grammar", syntax="ebnf", definition="a"), "tools[0].format.syntax"),
        (with_format(type="grammar", syntax={}, definition="a"), "tools[0].format.syntax"),
        (with_format(type="grammar", syntax="lark"), "tools[0].format.definition"),
        (with_format(type="grammar", syntax="regex", definition=[1]), "tools[0].format.definition"),
        ({"tools": [CUSTOM, {"type": "namespace", "name": "x"}]}, "tools[1].tools"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [1]}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": [CUSTOM]}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "x", "description": 1, "tools": [CUSTOM]}]},
            "tools[0].description",
        ),
        (
            {"tools": [{"type": "namespace", "name": "x", "tools": [CUSTOM, {"name": None}]}]},
            "tools[0].tools[1].name",
        ),
        ({"tools": [{"type": "function", "name": "p"}, CUSTOM]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}]}, "tools"),
        ({"tools": [{"type": []}]}, "tools"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "q"}}, "tool_choice"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": []}}, "tool_choice"),
        (with_item(type="custom_tool_call", call_id="c", name="p"), "input[1].input"),
        (with_item(type="custom_tool_call", call_id="c", input="x"), "input[1].name"),
        (
            with_item(type="custom_tool_call", call_id="c", name="p", input="", namespace=1),
            "input[1].namespace",
        ),
        (with_item(type="custom_tool_call_output", output="x"), "input[1].call_id"),
        (with_item(type="custom_tool_call_output", call_id="c", output=7), "input[1].output"),
        (with_item(type="local_shell_call", call_id="c", action="ls"), "input[1].action"),
        (with_item(type="local_shell_call", call_id="c"), "input[1].action"),
        (with_item(type="local_shell_call_output", id=7, output="x"), "input[1].call_id"),
        (with_item(type="shell_call", call_id="c", action=[]), "input[1].action"),
        (with_item(type="shell_call_output", call_id="c", output="x"), "input[1].output"),
        (with_item(type="apply_patch_call", call_id="c", operation=None), "input[1].operation"),
        (with_item(type="apply_patch_call_output", call_id="c", output={}), "input[1].output"),
        (with_item(type=[]), "input[1].type"),
        (with_item(type={"a": 1}), "input[1].type"),
        (with_item(type="compaction_trigger"), "input[1].type"),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_by_name(server, changes, name):
    body = {"input": "a", "max_output_tokens": 1} | changes
    for streams in (False, True):
        status, _, answer = post(server, body | {"stream": streams}, "/v1/responses")
        assert (status, answer["error"]["param"]) == (400, name), answer


@pytest.fixture(scope="module")
def server():
    with scripted(template("json_tools"), TAGS) as made:
        yield made


@pytest.mark.parametrize("kind", ["lark", "regex"])
@pytest.mark.parametrize(
    "definition",
    ["(", "[", "start: ", "start: start", "\\", "%import x", "a{9999}", "start: <[9]>"],
)
def test_a_wrong_grammar_is_refused(server, kind, definition):
    grammar = {"type": "grammar", "syntax": kind, "definition": definition}
    body = {"input": "a", "max_output_tokens": 1, "tools": [CUSTOM | {"format": grammar}]}
    assert post(server, body | {"metadata": {"script": "a"}}, "/v1/responses")[0] == 200
    status, _, answer = post(server, body | {"tool_choice": "required"}, "/v1/responses")
    is_expression = (kind, definition) in (("regex", "start: "), ("regex", "start: start"))
    is_expression |= (kind, definition) in (("regex", "%import x"), ("regex", "start: <[9]>"))
    assert status in ((200,) if is_expression else (200, 400)), answer
    assert status == 200 or answer["error"]["param"] == "tools", answer


class Table(dict):
    """A dictionary that is never searched as a whole."""

    def items(self):
        raise AssertionError("it was searched")


def test_a_choice_of_many_tools_searches_them_not_for_each():
    """4,000 allowed tools among as many took 2.6 s, ten times as many some minutes."""
    offered = client_tools.read(TOOLS)
    offered.own = Table(offered.own)
    asked = ("patch", True), ("f", False), ("find", False), ("note", True), ("crm__note", True)
    found = [offered.named(*each) for each in asked]
    assert found == ["patch", "f", "crm__find", "crm__note", "crm__note"]
    assert [offered.named(x, True) for x in ("f", "x", None, [])] == ["f", "x", None, []]
