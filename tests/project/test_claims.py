"""docs/claims.md names the evidence of each sentence of the README with a figure or a "can"."""

import ast
import re
from importlib.util import find_spec

import pytest

from tests.support.documents import FENCE, ROOT

README = (ROOT / "README.md").read_text()
CLAIMS = (ROOT / "docs" / "claims.md").read_text()
ROW = re.compile(r"^\| (.+?) \| (.*) \|$", re.MULTILINE)


def plain(text: str) -> str:
    """A text without links, bold marks, pictures and comments."""
    text = re.sub(r"<!--.*?-->|!\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "")


def sentences(text: str) -> list[str]:
    """The sentences of a document's prose: without snippets, tables and headings."""
    text = plain(re.sub(r"^\|.*$", "", FENCE.sub("", text), flags=re.MULTILINE))
    paragraphs = re.split(r"\n\s*\n|^- |^#.*$", text, flags=re.MULTILINE)
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [each for text in joined for each in re.split(r"(?<=[.?]) (?=[\w`\"])", text) if each]


def is_claim(sentence: str) -> bool:
    """Whether a sentence has a figure, beside those in code, or says what somebody can do."""
    words = re.sub(r"`[^`]*`", "", sentence)
    return bool(re.search(r"\d|\bcan\b|\b(two|three|four|five|ten) (of|to)\b", words))


def listed() -> dict[str, str]:
    """The evidence of each sentence."""
    return {plain(sentence): evidence for sentence, evidence in ROW.findall(CLAIMS)[1:]}


def is_there(span: str) -> bool:
    """Whether a test, a command or a file is there."""
    file, _, name = span.partition("::")
    if name:
        path = ROOT / file
        *classes, name = name.split("::")
        body = ast.parse(path.read_text()).body if path.is_file() else []
        for each in classes:
            body = next(
                (n.body for n in body if isinstance(n, ast.ClassDef) and n.name == each), []
            )
        return name in [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if command := re.match(r"python -m ([\w.]+)", span):
        return find_spec(command[1]) is not None
    return (ROOT / span).exists()


def unlisted(readme: str) -> list[str]:
    return [each for each in sentences(readme) if is_claim(each) and each not in listed()]


def test_each_claim_of_the_readme_is_listed():
    assert unlisted(README) == []


def test_each_listed_sentence_is_in_the_readme():
    assert listed().keys() - set(sentences(README)) == set()


@pytest.mark.parametrize("sentence", listed())
def test_the_evidence_is_there(sentence):
    spans = re.findall(r"`([^`]+)`", listed()[sentence])
    assert spans
    assert [span for span in spans if not is_there(span)] == []


@pytest.mark.parametrize("planted", ["It is 9 times faster.", "An engine can train a model."])
def test_a_claim_without_evidence_is_found(planted):
    assert unlisted(README.replace("\n## Limits\n", f"\n{planted}\n\n## Limits\n")) == [planted]


@pytest.mark.parametrize(
    "span",
    [
        "tests/project/test_claims.py::test_nothing",
        "tests/project/test_nothing.py::test_the_evidence_is_there",
        "python -m scripts.nothing",
        "docs/nothing.md",
    ],
)
def test_evidence_that_is_missing_is_found(span):
    assert not is_there(span)
