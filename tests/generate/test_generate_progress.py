"""The progress bar of ``python -m mlx_paged.generate``."""

import io
import re
import sys
from functools import partial

import pytest
from tqdm import tqdm

from mlx_paged.generate import report
from tests.support.commands.generate_runs import CLASS, FUNCTION, LONG

pytest_plugins = ["tests.support.commands.generate_fixtures"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def drawn(run, monkeypatch):
    """Run the command with a terminal as stderr. Returns the finished texts and the other counts of
    every drawn bar."""

    def drawn(*arguments: object) -> list[tuple[str, str]]:
        screen = Terminal()
        monkeypatch.setattr(report, "tqdm", partial(tqdm, mininterval=0, ncols=100))
        monkeypatch.setattr(report, "BRIEF_DELAY", 0)
        monkeypatch.setattr(sys, "stderr", screen)
        assert run(*arguments).status == 0
        bar = re.compile(r"(\d/\d texts) .*<[\d:?]+(?:, )?(.*)")
        found = map(bar.match, re.split(r"[\r\n]+", screen.getvalue()))
        return [each.groups() for each in found if each]

    return drawn


def test_many_prompts_show_their_progress_on_a_terminal(run, drawn):
    shown = drawn("-p", FUNCTION, "-p", CLASS, "-m", 4)
    assert shown[0] == ("0/2 texts", "") and shown[-1][0] == "2/2 texts"
    assert shown[-1][1].endswith(" prompt tokens, 8 generated, 0 running")
    assert "texts" not in run("-p", FUNCTION, "-p", CLASS, "-m", 4).err


def test_a_long_prompt_shows_its_progress(drawn, demo):
    """Of a single prompt, too, whose text has not begun."""
    prompt = LONG * 6
    total = len(demo[1].encode(prompt))
    monotonic = []
    for more in ([], ["-p", "x"]):
        shown = drawn("-p", prompt, "-m", 1, "--prefill-chunk", 16, *more)
        found = [re.match(r"(\d+)/(\d+) prompt tokens", text) for _, text in shown]
        monotonic.append([int(each[1]) for each in found if each])
    alone, beside = monotonic
    assert len(alone) > total // 16 - 2 and alone == sorted(alone) and alone[-1] == total
    assert len(beside) > total // 16 - 2 and beside == sorted(beside)


def test_a_beam_search_shows_its_progress(drawn):
    shown = drawn("-p", CLASS, "-m", 8, "--beams", 3)
    generated = [int(found[1]) for _, text in shown if (found := re.search(r"(\d+) gen", text))]
    assert len(set(generated)) > 5 and generated == sorted(generated)


def test_the_bar_of_a_single_prompt_goes_when_its_text_comes(run, drawn, monkeypatch, expected):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    shown = drawn("-p", LONG, "-m", 9, "--prefill-chunk", 16)
    assert shown and all(" 0 generated" in text for _, text in shown if text)
    assert screen.getvalue() == f"{expected(LONG, 9)}\n"
