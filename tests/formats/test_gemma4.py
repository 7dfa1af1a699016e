"""Calls of Gemma 4: cases of the format, and random calls."""

import pytest

from mlx_paged.formats.gemma4 import Gemma4
from tests.support.formats.gemmas import gemma_cases, gemma_render
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import check_case, check_round_trips

MARKS = Gemma4.tokens


@pytest.mark.parametrize("case", gemma_cases(MARKS), ids=lambda case: case.name[:20])
def test_cases(case):
    check_case(Gemma4, MARKS, case)


def test_random_calls_come_back():
    check_round_trips(Gemma4, MARKS, gemma_render(*MARKS), quotes=MARKS, rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Gemma4, MARKS, ends=MARKS[2:])
