"""A reader follows one decode step through few files."""

import re

import pytest

from scripts.step_path import decode_step, main


@pytest.mark.parametrize(("compile", "files", "moves"), [(True, 15, 40), (False, 18, 69)])
def test_a_decode_step_visits_few_files(compile, files, moves):
    path = decode_step(compile=compile)
    assert len(path.files) <= files
    assert path.moves.total() <= moves


def test_the_script_prints_its_counts_and_its_moves(capsys):
    main(["--rows", "2", "--list"])
    counts, *moves = capsys.readouterr().out.splitlines()
    total = int(re.fullmatch(r"\d+ files, \d+ functions, \d+ calls, (\d+) moves", counts)[1])
    assert sum(int(line.split()[0]) for line in moves) == total
    assert all(re.fullmatch(r" *\d+ \S+\.py -> \S+\.py", line) for line in moves)
