"""Chat templates end, whatever they do, and render as transformers renders them."""

from copy import deepcopy

import pytest
from jinja2 import UndefinedError

from mlx_paged.chat import budget
from mlx_paged.chat.budget import Budget, TemplateTooLongError
from mlx_paged.chat.rendering import rendered, reserved_names
from tests.support.commands.server_harness import demo

MANY = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(x=START, y=START) %}{% for a in range(60) %}BODY{% endfor %}"
NESTING = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
LONG = "{% set s = 'a' * 90000 %}"


def growing(start, body, after):
    return GROWING.replace("START", start).replace("BODY", body) + after


ENDLESS = {
    "loops": MANY.replace("BODY", ""),
    "a loop's condition": MANY.replace(" %}BODY", " if false %}"),
    "a loop's text": MANY.replace("BODY", "text " * 1000),
    "a loop over a filter": "{% for a in range(99999)|map('string') %}"
    "{% for b in range(99999)|map('string')|map('upper') %}{% endfor %}{% endfor %}",
    "a loop of filters": "{% for a in range(99999) %}"
    "{% set x = range(99999)|groupby('real') %}{% endfor %}",
    "a loop of selections": "{% for a in range(99999) %}"
    "{{ range(99999)|list|select('none')|list }}{% endfor %}",
    "a loop of minima": "{% for a in range(99999) %}{% set x = range(99999)|min %}{% endfor %}",
    "a loop of slices": LONG + MANY.replace("BODY", "{% set x = s[1:] %}"),
    "a loop of searches": LONG + MANY.replace("BODY", "{% set x = 'b' in s %}"),
    "a loop of comparisons": LONG + MANY.replace("BODY", "{% set x = s == s[1:] ~ 'a' %}"),
    "a loop of methods": MANY.replace("BODY", "{% set x = 'a'.upper() %}"),
    "a loop in a block": MANY.replace("BODY", "{% set x %}text{% endset %}"),
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "callers": "{% macro m() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}"
    "{% call m() %}{% for b in range(99999) %}{% endfor %}{% endcall %}{% endfor %}",
    "text times a number": "{{ 'x' * 10 ** 10 }}",
    "a number times a list": "{% set x = 10 ** 10 * [0] %}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "products": growing("7", "{% set ns.x = ns.x * ns.x %}", "{{ ns.x }}"),
    "sums of texts": growing("'ab'", "{% set ns.x = ns.x + ns.x %}", "{{ ns.x }}"),
    "joined texts": growing("'ab'", "{% set ns.x = ns.x ~ ns.x %}", "{{ ns.x }}"),
    "nested lists": growing("['a']", NESTING, "{{ ns.x }}"),
    "nested lists as JSON": growing("['a']", NESTING, "{{ ns.x | tojson }}"),
    "nested lists compared": growing("['a']", NESTING, "{{ ns.x == ns.y }}"),
    "nested lists found": growing("['a']", NESTING, "{{ ns.x in [ns.y] }}"),
    "nested lists by a test": growing("['a']", NESTING, "{{ ns.x is eq(ns.y) }}"),
    "nested lists in a namespace": growing("['a']", NESTING, "{{ ns }}"),
    "nested objects": growing("1", "{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{{ ns.x | string }}"),
    "nested keys": growing("('a',)", "{% set ns.x = (ns.x, ns.x) %}", "{{ {ns.x: 1} }}"),
    "a nested index": growing("('a',)", "{% set ns.x = (ns.x, ns.x) %}", "{{ {}[ns.x] }}"),
    "deep keys": "{% set ns = namespace(x=1) %}{% for a in range(90000) %}"
    "{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "a constant center": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill by map": "{{ ['x'] | map('center', 10 ** 10) | list }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "indent": "{{ 'x\ny\n' | indent(10 ** 10) }}",
    "indent by text": LONG + "{{ s.replace('a', '\n') | indent(s, true) }}",
    "join": LONG + "{{ s | list | join(s) }}",
    "a text's join": LONG + "{{ s.join(s) }}",
    "replace": LONG + "{{ s | replace('a', s) }}",
    "a text's replace": LONG + "{{ s.replace('', s) }}",
    "translate": LONG + "{{ s.translate({97: s}) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "round": "{{ 5 | round(10 ** 10, 'ceil') }}",
    "tojson": "{{ [1, [2]] | tojson(indent=10 ** 10) }}",
    "a sum of lists": "{{ (range(99999) | list | batch(1) | list) | sum(start=[]) }}",
    "wordwrap": LONG + "{{ (s * 9) | wordwrap(1) }}",
    "striptags": "{% set s = '<>' * 90000 %}{{ s | striptags }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a width as argument": "{{ '%*d' % (10 ** 10, 1) }}",
    "a precision": "{{ '%.1000000000f' | format(1.0) }}",
    "a width of format": "{{ '{:>10000000000}'.format(1) }}",
    "a width of format as argument": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "a width of format_map": "{{ '{x:10000000000}'.format_map({'x': 1}) }}",
}
CHAT = [
    {"role": "system", "content": "Be kind. "},
    {"role": "user", "content": [{"type": "text", "text": "<b>Héllo</b> & bye"}]},
    {"role": "assistant", "content": "<think>\nhm\n</think>\nYes", "tool_calls": [{"id": "c1"}]},
    {"role": "user", "content": "And now?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"a": ["x", None, 1.5], "properties": {}}},
}
GOOD = [
    "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }}{{ m['role'] }}"
    "{{ m.content }}{% if not loop.first %}{{ loop.previtem.role }}{% endif %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}"
    "{% else %}none{% endfor %}{% for m in [] %}{% else %}empty{% endfor %}",
    "{% for m in messages[::-1] %}{% if m.role != 'user' %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}{{ messages[1:3] | length }}{{ messages[-1].content }}",
    "{% set ns = namespace(last=-1, seen=[]) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% set ns.seen = ns.seen + [m.role] %}{% endif %}{% endfor %}"
    "{{ ns.last }}{{ ns.seen | join(', ') }}{{ 0 < ns.last <= 3 }}{{ 'a' not in ns.seen }}",
    "{% macro show(v, depth=0) %}{% if v is mapping %}{% for k, x in v | dictsort %}{{ k }}:"
    "{{ show(x, depth + 1) }}{% endfor %}{% elif v is iterable and v is not string %}"
    "{% for x in v %}[{{ show(x, depth=depth + 1) }}]{% endfor %}{% else %}{{ v }}{% endif %}"
    "{% endmacro %}{% for t in tools %}{{ show(t) }}{% endfor %}",
    "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | map(attribute='type') | list }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | map(attribute='role') | unique | sort | join('-') }}"
    "{{ messages | groupby('role') | map('first') | join }}",
    "{% set c = messages[2].content %}{{ c.split('</think>')[-1].lstrip('\n') }}"
    "{{ '</think>' in c }}{{ c | trim | upper | replace('YES', 'no') | indent(2) }}"
    "{{ '%s-%03d' % (c | length, 7) }}{{ '{:>5}|{x}'.format(1, x='y') }}{{ 'ab' * 3 ~ 1 ~ none }}",
    "{% set t %}{% for m in messages %}{{ m.role | e }}{% endfor %}{% endset %}{{ t }}"
    "{% filter upper %}{{ t }}{% endfilter %}{% macro box() %}({{ caller('x') }}){% endmacro %}"
    "{% call(y) box() %}{{ y }}{% endcall %}{{ undefined_name }}{{ x is defined }}",
    "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    "{{ bos_token }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ -3 | abs }}{{ 1.256 | round(1) }}"
    "{{ {'a': 1}['a'] }}{{ {'k': messages[0].role}.get('k') }}{{ dict(a=1).items() | list }}",
    "{% for a in [[1, [2, [3]]]] recursive %}{{ a[0] }}{{ loop(a[1:]) if a[1:] else '' }}"
    "{% endfor %}"
    "{% block b %}block{% endblock %}{{ self.b() }}{{ cycler('a', 'b').next() }}"
    "{{ 'x' if enable_thinking else 'y' }}{{ range(3) | list }}{{ (messages | last).content }}",
    "{{ raise_exception('no ' ~ messages | length) }}",
    "{{ messages[0].nothing.more }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
]
"""Also templates that raise."""


@pytest.fixture
def tokenizer():
    """The demo model's."""
    tokenizer = demo()[1]
    before = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = before


def outcome(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_asks_for_too_much_ends(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(TemplateTooLongError, match=r"steps|levels|integer"):  # not by its time
        rendered(tokenizer, CHAT)


def test_a_template_whose_recursion_has_no_end_ends(tokenizer):
    tokenizer.chat_template = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    with pytest.raises(RecursionError):
        rendered(tokenizer, CHAT)
    tokenizer.chat_template = "{{ lipsum(10 ** 9) }}"
    with pytest.raises(UndefinedError):
        rendered(tokenizer, CHAT)


def test_a_template_of_slow_steps_ends_by_time(tokenizer, monkeypatch):
    monkeypatch.setattr(budget, "SECONDS", 0.0)
    tokenizer.chat_template = "{% for a in range(2000) %}{% endfor %}"
    with pytest.raises(TemplateTooLongError, match="more than 0 s"):
        rendered(tokenizer, CHAT)


@pytest.mark.parametrize("template", GOOD)
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "enable_thinking": True}], ids=str)
def test_a_template_renders_as_transformers_renders_it(tokenizer, template, options):
    tokenizer.chat_template = template
    wanted = outcome(tokenizer.apply_chat_template, deepcopy(CHAT), tokenize=False, **options)
    assert outcome(rendered, tokenizer, deepcopy(CHAT), **options) == wanted
    wanted = outcome(
        tokenizer.apply_chat_template, CHAT[:3], tokenize=False, continue_final_message=True
    )
    assert outcome(rendered, tokenizer, CHAT[:3], continue_final_message=True) == wanted


def test_a_template_may_look_at_all_messages_for_each(tokenizer):
    """As that of Gemma 4 does."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% for j in range(loop.index0 - 1, -1, -1) %}"
        "{% if messages[j].role == 'none' %}{{ j }}{% endif %}{% endfor %}{{ m.content }}"
        "{% endfor %}"
    )
    assert rendered(tokenizer, CHAT[3:] * 600) == "And now?" * 600


def test_a_chat_has_steps_for_its_items_and_for_its_text():
    none, one, text = (
        Budget.of(value).steps for value in ([], [{"a": 1}], ["a" * budget.STEP_BYTES * 100])
    )
    assert one - none >= 3 * budget.STEPS_PER_WEIGHT
    assert text - none >= 100 * budget.STEPS_PER_WEIGHT


def test_arguments_of_rendering_are_reserved():
    names = reserved_names()
    assert {"chat_template", "tokenize", "tokenizer_kwargs", "tools", "conversation"} <= names
    assert names.isdisjoint({"documents", "enable_thinking", "reasoning_effort"})
