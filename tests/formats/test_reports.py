"""Answers of models that parsers of other servers have read wrongly, as their users reported."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.registry import named
from tests.support.formats.harness import Case, function, merged, read
from tests.support.formats.harness import made as made_with

TOOLS = [
    function("get_time"),
    function("apply_diff", string={"type": "string"}),
    function("get_weather", zip={"type": "string"}, days={"type": "integer"}),
    function("glob", pattern={"type": "string"}),
    function("write", path={"type": "string"}, text={"type": "string"}),
]


def glm(name, **arguments):
    inner = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()]
    return f"<tool_call>{name}\n{''.join(inner)}</tool_call>"


def coder(name, **arguments):
    inner = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(inner)}</function>\n</tool_call>"


def xml(name, **arguments):
    inner = [f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items()]
    return f'<invoke name="{name}">\n{"".join(inner)}</invoke>\n'


def minimax(*invokes):
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def dsml(name, outer):
    mark = "｜DSML｜"
    value = f'<{mark}parameter name="zip" string="true">1</{mark}parameter>\n'
    value += f'<{mark}parameter name="days" string="false">2</{mark}parameter>\n'
    invoke = f'<{mark}invoke name="{name}">\n{value}</{mark}invoke>\n'
    return f"<{mark}{outer}>\n{invoke}</{mark}{outer}>"


def call(name, **arguments):
    return Call(name, json.dumps(arguments, ensure_ascii=False))


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
NEXT = "<|start|>assistant"
PLAN = "<|channel|>commentary<|message|>I look.<|end|>"
UNENDED = '{"data":{"a":{"b":1}}'
REGEX = '<tool_call>{"name": "glob", "arguments": {"pattern": "\\d+"}}</tool_call>'
MARKUP = "a </parameter>\n</function> b <parameter=path>"
REPORTS = {
    "harmony": [
        Case(
            "a recipient in the channel analysis",
            f"{ANALYSIS}{NEXT}<|channel|>analysis to=functions.glob code<|message|>"
            '\n{"pattern": "a"}<|call|>',
            [Thought("Hm."), call("glob", pattern="a")],
        ),
        Case(
            "a recipient in the role",
            f"{ANALYSIS}{NEXT} to=functions.get_time<|channel|>commentary <|constrain|>json"
            "<|message|>{}<|call|>",
            [Thought("Hm."), call("get_time")],
        ),
        Case(
            "a commentary without a recipient",
            f"{ANALYSIS}{NEXT}{PLAN}{NEXT}"
            "<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
            [Thought("Hm."), Text("I look."), call("get_time")],
        ),
        Case(
            "no space before the type",
            "<|channel|>commentary to=functions.get_time<|constrain|>json<|message|>{}<|call|>",
            [call("get_time")],
        ),
        Case(
            "arguments without an end",
            f"<|channel|>commentary to=functions.glob<|constrain|>json<|message|>{UNENDED}",
            [Text(UNENDED)],
        ),
        Case(
            "other text in a header",
            "<|channel|>\u2013\u2013commentary<|message|>So.<|end|>",
            [Text("So.")],
        ),
        Case(
            "a channel twice",
            f"<|channel|>commentary?commentary?<|end|>{NEXT}{ANALYSIS}{NEXT}"
            "<|channel|>final<|message|>So.",
            [Thought("Hm."), Text("So.")],
        ),
        Case(
            "no header behind a thought",
            f"{ANALYSIS}Hello there.",
            [Thought("Hm."), Text("Hello there.")],
        ),
    ],
    "glm47": [
        Case("no arguments", "<tool_call>get_time</tool_call>", [call("get_time")]),
        Case("no name", "<tool_call>\n</tool_call>", [Text("<tool_call>\n</tool_call>")]),
        Case(
            "white space around a value",
            glm("apply_diff", string="    indented code    "),
            [call("apply_diff", string="    indented code    ")],
        ),
        Case(
            "a text of digits",
            glm("get_weather", zip="10001", days=3),
            [call("get_weather", zip="10001", days=3)],
        ),
        Case(
            "a pattern",
            glm("glob", pattern="**/public-audit.md"),
            [call("glob", pattern="**/public-audit.md")],
        ),
        Case(
            "calls without a line between",
            glm("get_time") + glm("get_time"),
            [call("get_time"), call("get_time")],
        ),
    ],
    "mistral": [
        Case(
            "a list",
            '[TOOL_CALLS] [{"name": "glob", "arguments": {"pattern": "2+3"}}]',
            [call("glob", pattern="2+3")],
        ),
        Case(
            "a list with an identity",
            '[TOOL_CALLS][{"name": "glob", "arguments": {"pattern": "a"}, "id": "abcdefghi"}]',
            [Call("glob", '{"pattern": "a"}', "abcdefghi")],
        ),
    ],
    "qwen3_coder": [
        Case(
            "the tokens end in a call",
            coder("write", path="a", text="b")[:60],
            [Text(coder("write", path="a", text="b")[:60])],
            {"is_cut": True},
        ),
        Case("tags in a value", coder("write", text=MARKUP), [call("write", text=MARKUP)]),
        Case(
            "a call in a thought",
            f"<think>Hm. {coder('get_time')}",
            [Thought("Hm. "), call("get_time")],
        ),
        Case(
            "a line before the call and behind the thought",
            f"<think>\nHm.\n</think>\n\n{coder('get_time')}",
            [Thought("\nHm.\n"), call("get_time")],
        ),
    ],
    "json_tools": [
        Case("no escape of JSON", REGEX, [Text(REGEX)]),
        Case(
            "text of many bytes",
            '<tool_call>\n{"name": "write", "arguments": '
            '{"path": "guideline", "text": "说明在代码"}}\n</tool_call>',
            [call("write", path="guideline", text="说明在代码")],
        ),
        Case(
            "two calls at once",
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>' * 2,
            [call("get_time"), call("get_time")],
        ),
    ],
    "minimax_m2": [
        Case(
            "the same parameter in two calls",
            minimax(xml("write", path="a"), xml("write", path="b")),
            [call("write", path="a"), call("write", path="b")],
        ),
        Case("an invoke without parameters", minimax(xml("get_time")), [call("get_time")]),
        Case(
            "a name that is not declared before another call",
            minimax(xml("nothing"), xml("get_time")),
            [call("nothing"), call("get_time")],
        ),
        Case(
            "a thought without an end",
            f"<think>Hm.{minimax(xml('get_time'))}",
            [Thought("Hm."), call("get_time")],
        ),
    ],
    "gemma4": [
        Case(
            "a string of JSON",
            '<|tool_call>call:glob{pattern:"2+2"}<tool_call|>',
            [call("glob", pattern="2+2")],
        ),
    ],
    "deepseek_v32": [
        Case(
            "several parameters in one piece",
            dsml("get_weather", "function_calls"),
            [call("get_weather", zip="1", days=2)],
        ),
    ],
    "deepseek_v4": [
        Case(
            "marks as content",
            f"So.\n\n{dsml('get_weather', 'tool_calls')}",
            [Text("So.\n\n"), call("get_weather", zip="1", days=2)],
        ),
    ],
    "lfm2": [
        Case(
            "marks as content",
            "<|tool_call_start|>[glob(pattern='a')]<|tool_call_end|>Looking.",
            [call("glob", pattern="a"), Text("Looking.")],
        ),
    ],
    "minicpm5": [
        Case(
            "marks as content",
            '<function name="glob"><param name="pattern">a</param></function>',
            [call("glob", pattern="a")],
        ),
    ],
}
EACH = [(name, case) for name, cases in REPORTS.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), EACH, ids=lambda x: getattr(x, "name", x))
def test_what_users_reported(name, case):
    kind = named(name)
    assert kind is not None
    for width in (1, 4, 10_000):
        found = read(made_with(kind, ()), [case.parts], width, tools=TOOLS, **case.options)
        assert merged(found) == case.expected, width
