"""The examples run without an argument, on the demo model, in a process without network."""

import json
import re
import runpy
import socket
import sys

import pytest

from mlx_paged import unpatch_mlx_lm
from tests.support.documents import ROOT

EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix != ".md")
SHOWN = {  # what only a run to the end prints
    "agent": r"turn 1 \(0 of \d+ tokens cached\): \w+\('",
    "batch": r"(?s)(--- (length|stop), [\d.]+ s\nclass \w+:.*){8}",
    "drop_in": r"mlx_paged\.drop_in\.kv_caches\.KVCache; .* hold [\d,]+ bytes\n$",
    "groups": r"(?s)(rewards 0\.\d\d.*){3}(fork \d+: '.*'\n){4}prompt tokens computed: \d+\n$",
    "grpo": r"([0-9a-f]{8}: reward [01]\.\d{3}, loss -?\d+\.\d{3}\n){3}$",
    "notebook": r"\d+ steps, \d+ tokens, \d+ blocks copied\n$",
    "service": r"--- \d+ steps of the model for all\n$",
}


def refuse(*arguments: object) -> None:
    raise OSError("an example has no network")


def run_notebook(path) -> None:
    """Its cells of code, one after the other, with the names of those before."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs belong to no commit"
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_on_the_demo_model(path, monkeypatch, capsys):
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.delenv("MODEL", raising=False)
    try:
        run_notebook(path) if path.suffix == ".ipynb" else runpy.run_path(str(path), {}, "__main__")
    finally:
        unpatch_mlx_lm()
    assert re.search(SHOWN[path.stem], capsys.readouterr().out)


def test_they_are_seven_and_short():
    assert {path.stem for path in EXAMPLES} == SHOWN.keys()
    text = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"^\| `(\S+)`", text, re.MULTILINE) == [
        "batch.py",
        "service.py",
        "groups.py",
        "grpo.py",
        "agent.py",
        "drop_in.py",
        "notebook.ipynb",
    ]
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES if path.suffix == ".py")
