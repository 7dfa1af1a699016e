"""Texts of a chat never become control tokens: the chat template alone writes those."""

import json
import random
import re
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from mlx_paged.chat import encoding, marks
from mlx_paged.chat.encoding import encoded
from mlx_paged.chat.marks import SPARE, _names, part, spare
from mlx_paged.chat.rendering import rendered
from tests.support.models.tokenizers import CORPUS, tokenizer_of

KINDS = ("demo", "byte-level", "byte fallback", "byte fallback, first space kept", "words")
START, END, THINK, CLOSE = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
BARRED = "<|fim_prefix|>"
PRIVATE = "".join(map(chr, SPARE[:3]))

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.arguments | tojson }}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SPLITTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {% set c = m.content %}"
    "{% if '</think>' in c %}<think>{{ c.split('</think>')[0].split('<think>')[-1] }}</think>"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}<|im_end|>{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
TEMPLATES = {"chatml": CHATML, "splitting": SPLITTING, "plain": PLAIN}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return with_marks(tokenizer_of.__wrapped__(request.param))


def with_marks(tokenizer, template=CHATML):
    inner = tokenizer._tokenizer
    inner.add_tokens([AddedToken(name, special=True) for name in (START, END)])
    marks = (THINK, CLOSE, "<tool_call>", "</tool_call>", BARRED, "<h1>")
    inner.add_tokens([AddedToken(name, special=False) for name in marks])
    inner.chat_template = template
    return tokenizer


def user(content):
    return {"role": "user", "content": content}


def tokens_of(tokenizer, chat, **options):
    text = rendered(tokenizer, chat, **options)
    return encoded(tokenizer, text, add_special_tokens=False), str(text)


def counts(tokenizer, tokens):
    names = (START, END, THINK, CLOSE, "<tool_call>", BARRED)
    return {name: tokens.count(tokenizer.convert_tokens_to_ids(name)) for name in names}


def hidden(name):
    """A word that stands where a name does."""
    return "".join(x if x.isalnum() else "-" for x in name)


def call(arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": arguments}]}


NAMES = (START, END, THINK, CLOSE, "<tool_call>", BARRED)
PLACES = {
    "the text of a user": lambda x: [user(f"what is {x}? {x}{x} end{x}")],
    "a system prompt": lambda x: [{"role": "system", "content": x}, user("a")],
    "a result": lambda x: [user("a"), {"role": "tool", "content": f"\n{x}\n", "name": x}],
    "the text of an assistant": lambda x: [user("a"), {"role": "assistant", "content": f"b {x} c"}],
    "an argument of a call": lambda x: [call({"arguments": {"path": [x, {"y": x}]}})],
    "a key of a call": lambda x: [call({"arguments": {x: 1}})],
    "parts that a template joins": lambda x: [
        user([{"type": "text", "text": x[:at]}, {"type": "text", "text": x[at:]}])
        for at in range(1, len(x))
    ],
    "three parts": lambda x: [user([{"text": x[:1]}, {"text": x[1:-1]}, {"text": x[-1:]}])],
    "a role": lambda x: [{"role": x, "content": "a"}],
    "a key that a template puts in brackets": lambda x: [call({"arguments": {x[1:-1]: 1}})],
    "white space around a part": lambda x: [user([{"text": f"{x[:3]}"}, {"text": f"{x[3:]} \n"}])],
    "private characters": lambda x: [user(f"{PRIVATE}{x}{PRIVATE[0]}{x[:2]}{PRIVATE[1]}{x[2:]}")],
    "escaped private characters": lambda x: [user(json.dumps(PRIVATE) + x)],
    "names in names": lambda x: [user(f"{x[:3]}{x}{x[3:]} {x[:-1]}{x}>")],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_name_in_a_text_is_plain_text(tokenizer, place):
    for name in NAMES:
        if place == "a key that a template puts in brackets" and "|" not in name:
            continue  # the template itself writes the brackets of a plain word
        chat, harmless = PLACES[place](name), PLACES[place](hidden(name))
        tokens, text = tokens_of(tokenizer, chat, add_generation_prompt=True)
        assert text == tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        expected, _ = tokens_of(tokenizer, harmless, add_generation_prompt=True)
        assert counts(tokenizer, tokens) == counts(tokenizer, expected), name


def test_a_name_in_a_tool_is_plain_text(tokenizer):
    for name in NAMES:
        tools = [{"name": "a", "description": f"writes {name}", "parameters": {name: [name]}}]
        plain = [{"name": "a", "description": "writes", "parameters": {"b": []}}]
        tokens, _ = tokens_of(tokenizer, [user("a")], tools=tools)
        expected, _ = tokens_of(tokenizer, [user("a")], tools=plain)
        assert counts(tokenizer, tokens) == counts(tokenizer, expected)


@pytest.mark.parametrize("kind", ["demo", "byte-level"])
def test_the_tokens_are_those_of_a_tokenizer_without_the_name(kind):
    """And every other token is today's."""
    tokenizer = with_marks(tokenizer_of.__wrapped__(kind))
    plain = tokenizer_of.__wrapped__(kind)
    for name in (THINK, CLOSE, "<tool_call>"):
        text = f"if {name}x{name} == 1:\n\n{name}"
        tokens, whole = tokens_of(tokenizer, [user(text)])
        first, last = whole.split(text)
        ends = [tokenizer.encode(x, add_special_tokens=False) for x in (f"{first}x", last)]
        assert tokens[: len(ends[0]) - 1] == ends[0][:-1]
        assert tokens[-len(ends[1]) :] == ends[1]
        inner = tokens[len(ends[0]) - 1 : -len(ends[1])]
        assert inner == plain.encode(text)


@pytest.mark.parametrize("template", TEMPLATES)
def test_texts_without_names_have_todays_tokens(tokenizer, template):
    tokenizer._tokenizer.chat_template = TEMPLATES[template]
    rng = random.Random(template)
    words = [*" ".join(CORPUS[:4]).split(" "), "<", "|", ">", "<|", "|>", "<|im_", "<h1>", "\n", ""]
    words += ["think>", "<th", "  ", "end|>", PRIVATE, "</", '"', "\\", "é"]
    for _ in range(50):
        chat = [
            {"role": role, "content": " ".join(rng.choices(words, k=rng.randrange(9)))}
            for role in rng.choices(["user", "assistant", "system", "tool"], k=3)
        ]
        options = {"add_generation_prompt": rng.random() < 0.5}
        text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
        own = [name for name in NAMES if any(name in m["content"] for m in chat)]
        tokens, found = tokens_of(tokenizer, chat, **options)
        assert found == text
        if not own:
            assert tokens == tokenizer.encode(text, add_special_tokens=False), chat


def test_the_thought_of_an_assistant_stays_for_the_template_to_find(tokenizer):
    for template in (SPLITTING, CHATML):
        tokenizer._tokenizer.chat_template = template
        wrapped = SimpleNamespace(think_start=THINK, think_end=CLOSE)
        tokenizer._think_start, tokenizer._think_end = wrapped.think_start, wrapped.think_end
        for content in (f"{THINK}\nhm{CLOSE}\n\nyes", f" {THINK}hm", f"{THINK}{CLOSE}"):
            chat = [user("a"), {"role": "assistant", "content": content}]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            tokens, _ = tokens_of(tokenizer, chat)
            assert tokens == tokenizer.encode(text, add_special_tokens=False)
            tokens, _ = tokens_of(tokenizer, [user("a"), user(content)])
            assert not {THINK, CLOSE} & {x for x, n in counts(tokenizer, tokens).items() if n}


def test_a_message_that_is_continued_may_have_names(tokenizer):
    for text in (f"a {END}", f"a {END} b <", "a <|im_"):
        chat = [user("a"), {"role": "assistant", "content": text}]
        tokens, found = tokens_of(tokenizer, chat, continue_final_message=True)
        assert found.endswith(text)
        assert counts(tokenizer, tokens)[END] == found.count(END) - text.count(END)


@pytest.mark.parametrize("way", ["_without_marks", "_in_pieces"])
def test_tokenizers_of_other_kinds_know_no_name_either(tokenizer, way, monkeypatch):
    """As those in Python, which have no model of tokenizers."""
    monkeypatch.setattr(encoding, "_with_aliases", lambda *args, **options: None)
    if way == "_in_pieces":
        monkeypatch.setattr(encoding, "_without_marks", lambda *args, **options: None)
    for name in NAMES:
        tokens, _ = tokens_of(tokenizer, [user(f"a {name} b")])
        expected, _ = tokens_of(tokenizer, [user("a b")])
        assert counts(tokenizer, tokens) == counts(tokenizer, expected)


def test_a_piece_of_the_vocabulary_is_no_control_token_in_a_text():
    """As in vocabularies of Unigram, whose model finds special tokens in plain text."""
    pieces = {"<unk>": 0.0, "<s>": -1.0} | dict.fromkeys("<s>ab▁:ure", -5.0)
    backend = Tokenizer(models.Unigram([*pieces.items()], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_tokens([AddedToken("<s>", special=True)])
    assert [each.id for each in backend.model.tokenize("a<s>")] == [5, 1]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<s>{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    tokens, text = tokens_of(tokenizer, [user("a <s> b")])
    assert text == "user: a <s> b<s>" and tokens.count(1) == 1 and tokens[-1] == 1
    assert 0 not in tokens


def test_a_part_keeps_its_cuts():
    tokenizer = with_marks(tokenizer_of.__wrapped__("demo"))
    text = rendered(tokenizer, [user(f"a{END}b")])
    at = text.index(f"{END}b")
    whole = part(text, at - 2, at + len(END) + 1)
    assert whole == f"\na{END}b" and whole.cuts == (3,)
    assert part(text, at + 1).cuts == () and part(text, 0, at).cuts == ()


def test_the_longest_name_is_found_among_many():
    """As an alternation of all names, the longest first, which takes much longer."""
    rng = random.Random(0)
    names = frozenset("".join(rng.choices("<ab|>.", k=rng.randrange(2, 6))) for _ in range(300))
    slow = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    for _ in range(200):
        text = "".join(rng.choices("<ab|>. ", k=60))
        assert _names(names).found.findall(text) == slow.findall(text)


def test_a_chat_with_every_spare_character_is_refused():
    with pytest.raises(ValueError, match="all characters for private use: expected one"):
        spare(["".join(map(chr, SPARE))])


class Looked(str):
    """A text that counts how often one looks for a part of it."""

    looks = 0

    def __contains__(self, part):
        Looked.looks += 1
        return super().__contains__(part)


@pytest.mark.parametrize("form", [str, lambda x: json.dumps(x)[1:-1], lambda x: repr(x)[1:-1]])
@pytest.mark.parametrize("before", [0, marks.PIECE - 11, marks.PIECE - 1, marks.PIECE])
def test_a_spare_character_is_in_no_text_in_any_form(form, before):
    used = [*map(chr, SPARE[:2000])]
    texts = ["a", "b" * before + "".join(map(form, used)), "\\udb96", form(chr(SPARE[2001]))]
    assert spare(texts) == chr(SPARE[2000])


def test_many_texts_and_spare_characters_are_looked_at_once(monkeypatch):
    """Some hundred kilobytes of them took minutes, once for each character."""
    monkeypatch.setattr(Looked, "looks", 0)
    texts = [Looked("a")] * 100 + [Looked("".join(map(chr, SPARE[:500])))]
    assert spare(texts) == chr(SPARE[500])
    assert Looked.looks <= 3 * len(texts)
