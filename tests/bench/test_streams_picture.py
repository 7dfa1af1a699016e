"""README's picture: what the stored run says, at the speed of the run."""

import json
import re

import pytest

from scripts import streams

RESULT = json.loads(streams.RESULT.read_text())
DRAWN = streams.picture(RESULT)


def test_the_picture_is_that_of_the_stored_run():
    file = streams.RESULT.with_suffix(".svg")
    assert file.read_text() == DRAWN, "run `python -m scripts.streams --draw`"
    assert len(DRAWN) < 600_000
    assert not re.search(r"<script|<image|href|url\(|@import", DRAWN)


def text_of(name):
    """What is written above the streams of an engine."""
    [text] = re.findall(rf'<tspan class="name">{name}</tspan>(.*?)</text>', DRAWN)
    return text


def test_it_has_a_mark_for_every_token_and_says_the_longest_gaps():
    end = max(engine["first_token_s"] for engine in RESULT["engines"].values()) + streams.AFTER_S
    for i, (name, engine) in enumerate(RESULT["engines"].items()):
        [marks] = re.findall(rf'class="mark e{i}" d="(.*?)"', DRAWN)
        assert marks.count("M") == sum(t < end for times in engine["tokens_s"] for t in times)
        assert f": longest gap {streams.longest_gap_s(engine):.1f} s" in text_of(name)
    bound = f"--max-stall-ms {RESULT['max_stall_ms']:g}"
    assert bound in text_of("mlx_paged") and bound not in text_of("mlx-lm")
    assert bound in re.findall("<title>(.*?)</title>", DRAWN)[0]


def test_a_gap_counts_from_the_arrival_to_the_first_token_of_the_prompt():
    tokens_s = [[-9.0, -1.0, 1.0, 4.0, 9.0], [-0.5, 0.5, 3.9, 4.1]]
    engine = {"first_token_s": 4.0, "tokens_s": tokens_s}
    assert streams.longest_gap_s(engine) == pytest.approx(3.4)


def test_the_picture_begins_with_its_final_frame_and_moves_at_the_speed_of_the_run():
    [seconds] = re.findall(r"animation: run ([\d.]+)s linear", DRAWN)
    [frames] = re.findall(r"@keyframes run {\n(.*?)\n}", DRAWN, re.DOTALL)
    first, start, last = frames.splitlines()
    uncovered = "{ transform: translateX(760px)"
    held = re.fullmatch(rf"  0%, ([\d.]+)% {re.escape(uncovered)}; .*step-end }}", first)
    assert float(held[1]) * float(seconds) / 100 == pytest.approx(streams.HOLD_S, rel=1e-3)
    moves_at = re.fullmatch(r"  ([\d.]+)% { transform: none }", start)
    assert last == f"  100% {uncovered} }}"
    part = 100 - float(moves_at[1])
    end = max(engine["first_token_s"] for engine in RESULT["engines"].values())
    shown_s = streams.BEFORE_S + end + streams.AFTER_S
    assert float(seconds) * part / 100 == pytest.approx(shown_s, rel=1e-3)
    assert float(seconds) == pytest.approx(shown_s + streams.HOLD_S, abs=0.01)
