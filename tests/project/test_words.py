"""Pages that were rewritten in the terms of the field stay so, with lines of even length."""

import re

import pytest

from tests.support.documents import FENCE, ROOT

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in (
            *("structure", "engine", "compiled-decodes", "benchmarks", "support"),
            *("kv-quantization", "kv-disk", "metal-precedents"),
            *("five-minutes", "adapters", "several-macs", "speculation", "mtp-heads"),
            *("agents", "chats", "operations", "clients", "metrics", "drop-in"),
            "server",
        )
    ),
)
WORDS = {
    "but for": "except",
    "less those": "without",
    "once more": "again",
    "in the place of": "instead of",
    "goes? on": "continues",
    "under way": "in flight",
    "told": "reported",
    "known": "cached",
    "gives? up": "frees",
    "knows no": "does not import, does not support",
    "in turns": "in alternation",
    "the step before": "the previous step",
}
"""Words that readers have to translate, with those of the field."""
LONGEST = 120
GENERATED = re.compile(r"<!-- (published|measured).*?<!-- end -->", re.DOTALL)


def own_prose(text: str) -> str:
    """What is written by hand and no code."""
    return re.sub(r"`[^`\n]*`", "", GENERATED.sub("", FENCE.sub("", text)))


def found_words(text: str) -> list[str]:
    joined = " ".join(own_prose(text).split())
    return [word for word in WORDS if re.search(rf"\b{word}\b", joined, re.IGNORECASE)]


def long_lines(text: str) -> list[str]:
    """Lines of prose above the limit; tables, pictures and lists of files have one line each."""
    lines = GENERATED.sub("", FENCE.sub("", text)).split("\n")
    one_line = re.compile(r"\s*\||!\[|- `[\w./]+`: |#")
    return [line for line in lines if len(line) > LONGEST and not one_line.match(line)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_terms_of_the_field_and_even_lines(page):
    text = (ROOT / page).read_text()
    assert found_words(text) == []
    assert long_lines(text) == []


def test_a_word_and_a_long_line_are_found():
    assert found_words("All but\nfor one, `told`.") == ["but for"]
    assert long_lines("x" * 121 + "\n| " + "x" * 121) == ["x" * 121]
