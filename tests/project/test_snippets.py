"""The snippets of the documents run as they stand: Python offline, with the demo model.

Commands are parsed by their own parsers. A snippet that cannot run here has a comment in the line
before: <!-- not run: the reason -->.
"""

import ast
import re
import shlex
import socket
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Snippet, documents, parse, snippets

SNIPPETS = [s for path in documents() for s in snippets(path.read_text(), path)]
PYTHON = [s for s in SNIPPETS if s.language == "python"]
SHELL = [s for s in SNIPPETS if s.language in ("sh", "bash")]
DOCUMENTS = sorted({s.document for s in PYTHON})
OTHERS = ("pip install", ".venv/bin/pytest", "export ", "git ls-files", "-m venv")


def reason(snippet: Snippet) -> str | None:
    """Why a snippet is not run, if it says so."""
    found = re.fullmatch(r"<!-- not run: (.{8,}) -->\n", snippet.marker)
    return found and found[1]


def no_network(*arguments: object) -> None:
    raise OSError("a snippet has no network")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_runs(document: Path, monkeypatch, tmp_path, capsys):
    """In the order of the document; later snippets see the names of earlier ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in (s for s in PYTHON if s.document == document and reason(s) is None):
        lines = "\n" * (snippet.line - 1) + snippet.code  # errors name the document's lines
        exec(compile(lines, str(document), "exec"), names)
        calls = [n for n in ast.walk(ast.parse(snippet.code)) if isinstance(n, ast.Call)]
        prints = any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls)
        assert bool(capsys.readouterr().out.strip()) == prints, snippet.line


def commands(code: str) -> list[list[str]]:
    """The words of each command that runs a module of Python, without what is before."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            words = shlex.split(command.replace("[", "\\["), comments=True)
            if "-m" in words and any(re.search(r"python3?$", word) for word in words):
                found.append(words[words.index("-m") + 1 :])
            else:
                assert not words or any(text in command for text in OTHERS), command
    return found


@pytest.mark.parametrize("snippet", SHELL, ids=lambda s: f"{s.document.name}:{s.line}")
def test_commands_have_right_arguments(snippet):
    for module, *arguments in commands(snippet.code):
        if module != "venv":
            parse(module, tuple(arguments), check=True)


def test_a_wrong_argument_is_found():
    ((module, *arguments),) = commands("python -m mlx_paged.generate -p x --max-token-count 3")
    with pytest.raises(ValueError, match="unrecognized arguments: --max-token-count"):
        parse(module, tuple(arguments), check=True)


def test_a_failing_snippet_is_found():
    text = "a\n\n<!-- not run: it needs a Mac -->\n```python\nx\n```\n\n```python\n1 / 0\n```\n"
    first, second = snippets(text, ROOT)
    assert reason(first) == "it needs a Mac" and reason(second) is None
    assert (second.line, second.code) == (9, "1 / 0\n")
