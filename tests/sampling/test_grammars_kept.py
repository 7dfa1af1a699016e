"""What compiled grammars hold has a limit, and a grammar that has reached a limit works again."""

import json

import pytest

from mlx_paged import SamplingParams
from mlx_paged.sampling import grammar as compiler
from mlx_paged.sampling.grammar import Row, masks_of
from tests.support.commands.server_harness import demo

WINDOW = "(a|[^a])*a(.){200}"
"""Needs more states of a lexer with each text that it meets."""


@pytest.fixture
def grammars(monkeypatch):
    monkeypatch.setattr(compiler, "MAX_STATES", 2000)
    _, tokenizer = demo()
    return compiler.Grammars(tokenizer, 1792)


def followed(grammars, params, number):
    """Why a request ends, whose tokens differ from those of another number; None if 100 tokens are
    allowed."""
    state, tokens = grammars.start(params, 0), []
    for i in range(100):
        _, errors = masks_of([Row(0, state, tokens, len(tokens))], 1792)
        if errors:
            return str(errors[0])
        tokens.append(300 + (number * 7919 + i * 104729) % 1300)
    return None


def test_a_source_whose_lexer_is_full_is_compiled_anew(grammars):
    params = SamplingParams(regex=WINDOW)
    reasons = [followed(grammars, params, number) for number in range(6)]
    failed = [i for i, reason in enumerate(reasons) if reason is not None]
    assert failed and all("too many states" in reasons[i] for i in failed)
    assert all(reasons[i + 1] is None for i in failed if i + 1 < len(reasons))


def test_a_full_source_is_not_known(grammars):
    params = SamplingParams(regex=WINDOW)
    number = 0
    assert not grammars.knows(params)
    while followed(grammars, params, number) is None:
        assert grammars.knows(params)
        number += 1
    assert not grammars.knows(params)


def test_the_sources_that_are_kept_have_a_limit_of_bytes(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_KEPT", 4 * 300 * compiler.SOURCE_BYTES)
    schemas = [
        SamplingParams(json_schema=json.dumps({"const": f"{i}{'x' * 250}"})) for i in range(8)
    ]
    for params in schemas:
        grammars.compile(params)
        assert grammars.knows(params)
    known = [grammars.knows(params) for params in schemas]
    assert known == [False] * 4 + [True] * 4


def test_what_requests_follow_counts_too(grammars, monkeypatch):
    first, second = SamplingParams(regex=WINDOW), SamplingParams(regex="[ab]{9}")
    grammars.compile(first)
    monkeypatch.setattr(compiler, "MAX_KEPT", 20 * compiler.TOKEN_BYTES)
    assert followed(grammars, first, 0) is None
    grammars.compile(second)
    assert not grammars.knows(first) and grammars.knows(second)
