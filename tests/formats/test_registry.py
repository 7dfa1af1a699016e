"""Every format that mlx-lm knows is read, and the format of a model is chosen as documented."""

import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm import chat_templates, tool_parsers

from mlx_paged.formats import thoughts
from mlx_paged.formats.choice import TOOL, chosen
from mlx_paged.formats.foreign import Foreign
from mlx_paged.formats.registry import FORMATS
from tests.support.commands.scripted_models import CALLS, CHANNELS, TURNS, template

CALLS_OF_TEXT = "{% for c in m.tool_calls or [] %}{{ WRITTEN }}{% endfor %}"
BEGIN, END = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
TEXTS = [
    ("deepseek_v31", f"{BEGIN}' + c.function.name + '<｜tool▁sep｜>", END),
    (
        "deepseek_v3",
        f"{BEGIN}function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n",
        f"\\n```{END}",
    ),
    (
        "json_tools",
        """<tool_call>{"name": "' + c.function.name + '", "arguments": """,
        "}</tool_call>",
    ),
]
"""Formats, and what their templates write before and behind the text of arguments."""
MODULES = sorted(
    {
        module.name
        for package in (tool_parsers, chat_templates)
        for module in pkgutil.iter_modules(package.__path__)
    }
)


def tokenizer(chat_template, vocab=(), parser=None, folder="/nowhere"):
    """What formats see of mlx-lm's TokenizerWrapper."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages, tokenize, tools=None, **options):
        texts, _ = render_jinja_template([messages], tools=tools, chat_template=chat_template)
        return texts[0]

    module = parser and __import__(f"mlx_lm.tool_parsers.{parser}", fromlist=["x"])
    return SimpleNamespace(
        chat_template=chat_template,
        has_chat_template=chat_template is not None,
        get_vocab=lambda: {mark: i for i, mark in enumerate(vocab)},
        apply_chat_template=render,
        name_or_path=folder,
        eos_token_ids=(),
        decode=lambda tokens: "",
        tool_parser=module and module.parse_tool_call,
        tool_call_start=module and module.tool_call_start,
        tool_call_end=module and module.tool_call_end,
    )


def test_names_are_unique():
    names = [name for form in FORMATS for name in (form.name, *form.aliases)]
    assert all(names) and len(names) == len({*names})


def test_the_documentation_names_all_formats_and_styles():
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    names = [name for form in FORMATS for name in (form.name, *form.aliases)]
    assert [
        name for name in (*names, *thoughts.STYLES, thoughts.NONE) if f"`{name}`" not in text
    ] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_format_of_mlx_lm_has_its_own(name, tmp_path, caplog):
    """By the name of mlx-lm's parser, which a tokenizer's configuration can have."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tool_parser_type": name}))
    form = chosen(tokenizer("{{ messages }}", folder=str(tmp_path))).format
    assert name in (form.name, *form.aliases) and not caplog.text


def test_a_format_that_has_none_goes_through_the_parser_of_mlx_lm(caplog):
    def parse(text, tools):
        return {"name": "f", "arguments": {}}

    parse.__module__ = "mlx_lm.tool_parsers.other"
    given = tokenizer("{{ messages }}", parser="json_tools")
    given.tool_parser = parse
    form = chosen(given).format
    assert isinstance(form, Foreign) and form.name == "other" and "other" in caplog.text


@pytest.mark.parametrize("family", CALLS)
def test_what_the_template_writes_chooses(family):
    found = chosen(tokenizer(template(family)))
    assert (found.format.name, found.problem) == (family, None)


@pytest.mark.parametrize(("name", "before", "behind"), TEXTS)
def test_a_template_that_takes_arguments_as_text_gets_them_so(name, before, behind):
    written = f"'{before}' + c.function.arguments + '{behind}'"
    found = chosen(tokenizer(TURNS.replace("CALLS", CALLS_OF_TEXT.replace("WRITTEN", written))))
    assert (found.format.name, found.problem) == (name, None)
    function = {"name": "f", "arguments": {"x": "é", "n": 10**20}}
    given = [{"role": "user"}, {"role": "assistant", "tool_calls": [{"function": function}]}]
    user, said = found.format.history(given)
    assert user == given[0] and function["arguments"] == {"x": "é", "n": 10**20}
    text = '{"x": "é", "n": 100000000000000000000}'
    assert said["tool_calls"] == [{"function": {"name": "f", "arguments": text}}]


LEADS = "{% for m in messages %}{% if m.role == 'system' %}{{ tools }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("shows", ["", LEADS])
def test_a_template_may_write_tools_only_into_the_turn_of_the_system(shows):
    written = template("json_tools")
    written = shows + written.replace("tools or []", "[]") if shows else written
    found = chosen(tokenizer(written))
    assert (found.format.name, found.problem) == ("json_tools", None)
    chat = [{"role": "user", "content": "hi"}]
    led = [{"role": "system", "content": ""}, *chat] if shows else chat
    assert found.format.history(chat, True) == led and found.format.history(chat) == chat
    own = [{"role": "developer", "content": "Be."}, *chat]
    assert found.format.history(own, True) == own


def test_harmony_is_chosen_by_its_template_and_by_its_tokens():
    found = chosen(tokenizer(CHANNELS))
    assert (found.format.name, found.problem) == ("harmony", None)
    tokens = "<|start|>", "<|channel|>", "<|message|>"
    found = chosen(tokenizer("{{ messages }}", tokens))
    assert found.format.name == "harmony" and "ignores tools" in found.problem


def test_a_name_goes_before_what_the_template_writes(tmp_path):
    found = chosen(tokenizer(template("qwen3_coder")), "json_tools")
    assert found.format.name == "json_tools" and "is not read" in found.problem
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tool_parser_type": "qwen3_coder"}))
    found = chosen(tokenizer(template("json_tools"), folder=str(tmp_path)))
    assert found.format.name == "qwen3_coder" and "is not read" in found.problem


@pytest.mark.parametrize("names", [("nothing", None), (None, "nothing")])
def test_a_name_that_is_not_known_is_refused(names):
    with pytest.raises(ValueError, match=r"-format: expected one of .*, got 'nothing'"):
        chosen(tokenizer(None), *names)


def test_without_a_template_or_a_format_tools_have_a_problem():
    assert "no chat template" in chosen(tokenizer(None)).problem
    writes = TOOL["function"]["name"] + "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    assert "no parser is known" in chosen(tokenizer(writes)).problem


@pytest.mark.parametrize(
    ("vocab", "template", "name", "style"),
    [
        (["<think>", "</think>"], None, None, "think"),
        (["<think>"], None, None, None),
        ([], "x <think> y </think>", None, "think"),
        ([], None, "seed", "seed"),
        (["<think>", "</think>"], None, "none", None),
        (["[THINK]", "[/THINK]"], "<think></think>", None, "mistral"),
    ],
)
def test_the_marks_of_thoughts_are_chosen(vocab, template, name, style):
    found = thoughts.chosen({mark: i for i, mark in enumerate(vocab)}, template, name)
    assert found == (style and thoughts.STYLES[style])
