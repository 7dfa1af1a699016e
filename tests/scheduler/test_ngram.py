"""N-grams as drafts: what followed the same tokens before."""

import random

import pytest

from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.ngram import NgramDrafter


def ngram(tokens: list[int], **params: object) -> tuple[NgramDrafter, Request]:
    request = Request(0, tokens, SamplingParams(max_tokens=50), seed=0)
    drafter = NgramDrafter()
    drafter.likelihood(request)
    return drafter, request


def test_guesses_are_what_followed_the_last_tokens_before():
    drafter, request = ngram([5, 1, 2, 3, 9, 8, 7, 6, 1, 2, 3])
    assert drafter.likelihood(request) == (0.5,)
    assert drafter.propose([request], [3]) == [[9, 8, 7]]


def test_the_latest_occurrence_counts():
    drafter, request = ngram([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3])
    assert drafter.propose([request], [2]) == [[5, 1]]


def test_a_source_that_reaches_the_end_repeats_itself():
    drafter, request = ngram([4, 1, 2, 1, 2, 1])
    assert drafter.propose([request], [5]) == [[2, 1, 2, 1, 2]]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 1, 2]], ids=str)
def test_tokens_that_never_came_before_have_no_guess(tokens):
    drafter, request = ngram(tokens)
    assert drafter.likelihood(request) == ()


def test_right_guesses_make_more_of_them_likely_and_a_wrong_one_ends_the_run():
    copied = random.Random(1).sample(range(10**6), 40)
    drafter, request = ngram([*copied, *copied[:3]])
    seen = []
    for token in copied[3:30]:
        request.tokens.append(token)
        seen += drafter.likelihood(request)
    assert seen == sorted(seen) or min(seen[5:]) > 0.5
    assert seen[-1] > 0.95 and drafter.propose([request], [4]) == [copied[30:34]]
    request.tokens += [10**6 + i for i in range(4)]
    assert drafter.likelihood(request) == (), "an edit is shorter"


@pytest.mark.parametrize(
    ("edit", "following"),
    [([-1], 21), ([], 21), ([-1, 20], 21), ([-1, -2, 20], 21)],
    ids=["replaced", "left out", "added", "two added"],
)
def test_behind_an_edit_the_source_goes_on(edit, following):
    """At once if its tokens stand where the edit is left, and without a match of three tokens."""
    source = list(range(100, 140))
    drafter, request = ngram([*source, 7, *source[:10]])
    for token in [*source[10:20], *(source[i] if i >= 0 else i for i in edit)]:
        request.tokens.append(token)
        drafter.likelihood(request)
    if not edit:
        request.tokens.append(source[21])
        following = 22
    assert drafter.likelihood(request)[0] > 0
    assert drafter.propose([request], [3]) == [source[following : following + 3]]


def test_a_new_match_replaces_a_source_behind_an_edit():
    source, other = list(range(100, 140)), [1, 2, 3, 50, 51, 52]
    drafter, request = ngram([*other, *source, 7, *source[:10]])
    request.tokens += [*source[10:20], 1, 2, 3]
    assert drafter.likelihood(request)[0] > 0
    assert drafter.propose([request], [3]) == [[50, 51, 52]]


def test_tokens_of_one_slot_of_the_table_are_told_apart():
    """More n-grams than slots: a guess must still follow the very same tokens."""
    rng = random.Random(3)
    tokens = [rng.randrange(50) for _ in range(4000)]
    drafter, request = ngram(tokens)
    source = drafter._sources[0]
    source._mask = 15
    for _ in range(300):
        request.tokens.append(rng.randrange(50))
        if drafter.likelihood(request):
            place = source.guess_at
            run = source.run
            assert request.tokens[place - 3 : place] == request.tokens[-3:] or run > 0
