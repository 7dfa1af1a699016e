"""A reader follows one decode step through few files."""

import re

from scripts.step_path import decode_step, main


def test_a_decode_step_visits_few_files():
    path = decode_step()
    assert len(path.files) <= 30
    assert path.moves.total() <= 136


def test_the_script_prints_its_counts_and_its_moves(capsys):
    main(["--rows", "2", "--list"])
    counts, *moves = capsys.readouterr().out.splitlines()
    total = int(re.fullmatch(r"\d+ files, \d+ functions, \d+ calls, (\d+) moves", counts)[1])
    assert sum(int(line.split()[0]) for line in moves) == total
    assert all(re.fullmatch(r" *\d+ \S+\.py -> \S+\.py", line) for line in moves)
