"""The snippets of the documents run as they stand, offline, with the demo model.

Every command is parsed by its own parser, and those that take seconds run: `NOT_RUN` has the others
with the reason. A snippet of Python that cannot run here has a comment in the line before:
<!-- not run: the reason -->.
"""

import ast
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from mlx_paged import Engine, demo_model_path
from mlx_paged.loading import load_model
from tests.support.documents import ROOT, Snippet, documents, parse, snippets
from tests.support.models.adapters import random_arrays, write_adapter

SNIPPETS = [s for path in documents() for s in snippets(path.read_text(), path)]
PYTHON = [s for s in SNIPPETS if s.language == "python"]
SHELL = [s for s in SNIPPETS if s.language in ("sh", "bash")]
DOCUMENTS = sorted({s.document for s in PYTHON})
OTHERS = (
    "curl ",
    "lm_eval ",
    "pip install",
    ".venv/bin/pytest",
    "export ",
    "git ls-files",
    "-m venv",
)
MODELS = {"mlx-community/Qwen3-0.6B-4bit", "path/to/model", "models/4bit"}
"""Models that the documents name; the demo model stands in for them."""
NOT_RUN = {
    r"bench\..*|scripts\.(?!real_model).*": "it measures for minutes; tests/bench runs small sizes",
    r"scripts\.real_model .*": "it needs a network; test_real_model.py runs it on a tiny model",
    r"mlx_paged\.server( .*)?": "it serves until it gets a signal, as test_server_process.py does",
    r"mlx_paged\.run .*mlx_lm\.server .*": "the same; test_unchanged_scripts.py runs mlx-lm's",
    r"mlx_paged\.run mlx_lm\.generate .*": "its default model is on a hub; test_run.py has another",
    r"mlx_paged\.generate --model DIR .*": "mlx.launch starts it; test_ranks.py runs ranks",
    r"mlx_paged\.doctor .*": "it takes minutes; test_doctor.py runs a sample",
    r"mlx_paged\.heads .*": "it needs a checkpoint with a head; test_mtp_files.py writes some",
    r"mlx_paged\.generate .*--draft-head .*": "the same; test_mtp_drafts.py runs the command",
    r"venv .*": "it makes an environment, as CI does",
}


def reason(snippet: Snippet) -> str | None:
    """Why a snippet is not run, if it says so."""
    found = re.fullmatch(r"<!-- not run: (.{8,}) -->\n", snippet.marker)
    return found and found[1]


def no_network(*arguments: object) -> None:
    raise OSError("a snippet has no network")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_runs(document: Path, monkeypatch, tmp_path, capsys):
    """In the order of the document; later snippets see the names of earlier ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    if document.name == "adapters.md":
        write_adapters(tmp_path)
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


COMMANDS = {
    f"{s.document.name}:{s.line} {' '.join(words)[:50]}": words
    for s in SHELL
    for words in commands(s.code)
}
RUN = {n: w for n, w in COMMANDS.items() if not any(re.fullmatch(x, " ".join(w)) for x in NOT_RUN)}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the files that the documents name, in a process without network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "x ="}\n')
    (tmp_path / "script.py").write_text("import sys, mlx_lm\nprint(sys.argv[1:])\n")
    return tmp_path


def write_adapters(folder: Path) -> None:
    """The adapters that docs/adapters.md names, of the demo model."""
    for seed, name in enumerate(("sql", "fr")):
        write_adapter(folder / "adapters" / name, random_arrays(load_model()[0], seed))


def run(words: list[str]) -> str:
    """Run a command and return its standard output. Raises AssertionError if it fails."""
    module, *arguments = (str(demo_model_path()) if word in MODELS else word for word in words)
    if module == "mlx_paged.run":  # it replaces its process
        command = [sys.executable, "-m", module, *arguments]
        path = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    status: object = 0
    with patch.object(sys, "argv", [module, *arguments]), redirect_stdout(StringIO()) as output:
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    assert not status
    return output.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'(mlx_paged|scripts):RuntimeWarning")
@pytest.mark.parametrize("name", RUN)
def test_commands_run(name, workplace):
    words = RUN[name]
    if words[0] == "mlx_paged.kv_disk":
        engine = Engine(*load_model(), kv_disk="DIR", model_files=[demo_model_path()])
        engine.generate(["import os\n" * 40], max_tokens=1)
        engine.close()
    if "--adapter" in words:
        write_adapters(workplace)
    output = run(words)
    if "--output" in words:
        output = (workplace / words[words.index("--output") + 1]).read_text()
    assert output.strip()


def test_most_commands_of_the_package_run():
    ours = {name for name, (module, *_) in COMMANDS.items() if module.startswith("mlx_paged.")}
    assert len(RUN) >= len(ours) / 2
    assert {words[0] for words in RUN.values()} == {
        "mlx_paged.generate",
        "mlx_paged.kv_disk",
        "mlx_paged.run",
    }
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, " ".join(words)) for words in COMMANDS.values()), pattern


def test_lines_of_the_product_are_counted():
    (snippet,) = (s for s in SHELL if "git ls-files" in s.code)
    done = subprocess.run(["bash", "-c", snippet.code], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout.split()[0]) > 10_000 and not done.stderr


@pytest.mark.filterwarnings("ignore:'(mlx_paged|scripts):RuntimeWarning")
def test_a_failing_command_is_found(workplace):
    with pytest.raises(AssertionError):
        run(["mlx_paged.generate", "--model", "nowhere", "-p", "x"])


def test_a_wrong_argument_is_found():
    ((module, *arguments),) = commands("python -m mlx_paged.generate -p x --max-token-count 3")
    with pytest.raises(ValueError, match="unrecognized arguments: --max-token-count"):
        parse(module, tuple(arguments), check=True)


def test_a_failing_snippet_is_found():
    text = "a\n\n<!-- not run: it needs a Mac -->\n```python\nx\n```\n\n```python\n1 / 0\n```\n"
    first, second, third = snippets(text + "\n<!-- b -->\n```sh\nls\n```\n", ROOT)
    assert third.marker == "<!-- b -->\n" and third.code == "ls\n"
    assert reason(first) == "it needs a Mac" and reason(second) is None
    assert (second.line, second.code) == (9, "1 / 0\n")
