"""Beam search against a plain one over a small language model whose tables are all known."""

import math
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from mlx_paged.engine.beams import BeamGroup
from mlx_paged.outputs import Beam
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams

PENALTIES = [0.0, 0.6, 1.0, 2.0, -1.0]


@dataclass
class Hypothesis:
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TableModel:
    """A random language model of order two: next-token logprobs by the last two tokens."""

    def __init__(self, vocab: int, seed: int, sharpness: float = 2.0) -> None:
        logits = sharpness * np.random.default_rng(seed).standard_normal(
            (vocab + 1, vocab + 1, vocab)
        )
        self.vocab = vocab
        self.table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        before, last = ([self.vocab, self.vocab, *tokens])[-2:]
        return self.table[before, last]

    def candidates(self, beams: list[Hypothesis], width: int) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.logprobs(beam.generated) for beam in beams]
        tokens = [np.argsort(-row, kind="stable")[:width] for row in rows]
        logprobs = [row[t] for row, t in zip(rows, tokens, strict=True)]
        return np.stack(tokens), np.stack(logprobs)


def search(group: BeamGroup, model: TableModel, width: int | None = None) -> int:
    """Run a group to its end; return the number of steps."""
    beams, steps = [Hypothesis()], 0
    while not group.done:
        candidates = model.candidates(beams, width or group.num_candidates)
        survivors = group.advance(beams, *candidates)
        beams = [
            Hypothesis(
                [*beams[s.parent].generated, s.token], [*beams[s.parent].logprobs, s.logprob]
            )
            for s in survivors
        ]
        steps += 1
    return steps


def plain_search(
    model: TableModel,
    num_beams: int,
    max_tokens: int,
    penalty: float,
    stops: set[int],
    early_stopping: bool,
) -> list[tuple[list[int], float]]:
    """Beam search by its definition: whole vocabulary, never ended by a bound."""
    live, finished = [([], 0.0)], []
    for length in range(1, max_tokens + 1):
        pool = sorted(
            (([*tokens, v], total + lp) for tokens, total in live
             for v, lp in enumerate(model.logprobs(tokens))),
            key=lambda hypothesis: -hypothesis[1],
        )  # fmt: skip
        ended = [hypothesis for hypothesis in pool[:num_beams] if hypothesis[0][-1] in stops]
        live = [hypothesis for hypothesis in pool if hypothesis[0][-1] not in stops][:num_beams]
        finished += ended
        if early_stopping and len(finished) >= num_beams:
            break
        if length == max_tokens:
            finished += live
    scored = [(tokens, total / len(tokens) ** penalty) for tokens, total in finished]
    return sorted(scored, key=lambda hypothesis: -hypothesis[1])


def assert_same(found: list[Beam], expected: list[tuple[list[int], float]]) -> None:
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
    scores = [hypothesis.score for hypothesis in found]
    np.testing.assert_allclose(scores, [score for _, score in expected], rtol=1e-12)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stops", [set(), {0}, {0, 3, 5}], ids="stops{}".format)
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("num_beams", [1, 2, 3, 8])
def test_the_search_finds_what_a_plain_one_finds(num_beams, penalty, early_stopping, stops):
    for seed in range(6):
        model = TableModel(vocab=6, seed=seed)
        group = BeamGroup(num_beams, 8, penalty, early_stopping, stops)
        search(group, model)
        expected = plain_search(model, num_beams, 8, penalty, stops, early_stopping)
        assert_same(group.best, expected[:num_beams])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("seed", range(4))
def test_enough_beams_find_the_best_of_all_sequences(penalty, seed):
    model, depth, stop = TableModel(vocab=3, seed=seed), 4, 0
    everything = []
    for length in range(1, depth + 1):
        for tokens in product(range(3), repeat=length):
            ends = tokens[-1] == stop or length == depth
            if ends and stop not in tokens[:-1]:
                logprobs = [model.logprobs(list(tokens[:i]))[t] for i, t in enumerate(tokens)]
                everything.append((list(tokens), sum(logprobs) / length**penalty))
    everything.sort(key=lambda hypothesis: -hypothesis[1])
    group = BeamGroup(3**depth, depth, penalty, stop_token_ids={stop})
    search(group, model)
    assert_same(group.best, everything)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_stopping_at_the_bound_saves_steps_and_changes_no_answer(penalty, num_beams):
    steps = []
    for seed in range(30):
        model = TableModel(vocab=6, seed=seed, sharpness=4.0)
        group = BeamGroup(num_beams, 12, penalty, stop_token_ids={0})
        steps.append(search(group, model))
        expected = plain_search(model, num_beams, 12, penalty, {0}, early_stopping=False)
        assert_same(group.best, expected[:num_beams])
    assert min(steps) < 12


def advance_once(group: BeamGroup, *logprobs: float) -> list:
    """The first step, with tokens 0, 1, ..."""
    return group.advance([Hypothesis()], [list(range(len(logprobs)))], [list(logprobs)])


@pytest.mark.parametrize(
    "penalty, stop, live, done",
    [
        # A live one can reach its sum over 8 ** penalty, or over 3 ** penalty if that is below 0.
        (0.0, -1.0, -1.1, True),
        (0.0, -1.1, -1.0, False),
        (1.0, -1.0, -3.9, False),
        (1.0, -1.0, -4.1, True),
        (-1.0, -1.0, -0.67, True),
        (-1.0, -1.0, -0.66, False),
        (1.0, -1.0, -4.0, True),  # it can only draw level
    ],
)
def test_the_search_ends_exactly_when_no_live_hypothesis_can_win(penalty, stop, live, done):
    group = BeamGroup(2, 8, penalty, stop_token_ids={0})
    assert advance_once(group, 0.0, 0.0)
    survivors = group.advance([Hypothesis([1], [0.0])], [[0, 1]], [[stop, live]])
    assert group.done is done and bool(survivors) is not done


def test_survivors_are_ranked_and_name_their_parents():
    group = BeamGroup(2, 8)
    assert advance_once(group, -2.0, -1.0, -3.0) == [(0, 1, -1.0), (0, 0, -2.0)]
    beams = [Hypothesis([1], [-1.0]), Hypothesis([0], [-2.0])]
    candidates = [[4, 5], [6, 7]], [[-3.0, -4.0], [-0.5, -5.0]]
    assert group.advance(beams, *candidates) == [(1, 6, -0.5), (0, 4, -3.0)]


def test_ties_go_to_the_earlier_hypothesis_then_to_the_earlier_candidate():
    group = BeamGroup(3, 8)
    assert [s.token for s in advance_once(group, -1.0, -1.0, -1.0, -1.0)] == [0, 1, 2]
    beams = [Hypothesis([t], [-1.0]) for t in range(3)]
    survivors = group.advance(beams, [[8, 9]] * 3, [[-1.0, -1.0]] * 3)
    assert [(s.parent, s.token) for s in survivors] == [(0, 8), (0, 9), (1, 8)]


def test_a_stop_token_below_the_best_num_beams_is_dropped():
    group = BeamGroup(2, 8, stop_token_ids={2, 3})
    assert [s.token for s in advance_once(group, -1.0, -3.0, -4.0, -2.0)] == [0, 1]
    assert [hypothesis.tokens for hypothesis in group.best] == [[3]]


def test_of_equal_scores_the_one_that_finished_first_is_better():
    group = BeamGroup(2, 2, length_penalty=0.0, stop_token_ids={0})
    advance_once(group, -1.0, -0.5)
    group.advance([Hypothesis([1], [-0.5])], [[0, 2]], [[-0.5, -1.0]])
    assert [hypothesis.tokens for hypothesis in group.best] == [[0], [1, 0]]


def test_early_stopping_waits_for_as_many_as_there_are_beams():
    group = BeamGroup(2, 8, early_stopping=True, stop_token_ids={0})
    assert advance_once(group, -1.0, -9.0)
    assert group.advance([Hypothesis([1], [-9.0])], [[0, 1]], [[-1.0, -2.0]]) == []
    assert [hypothesis.tokens for hypothesis in group.best] == [[0], [1, 0]]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_impossible_tokens_never_live_on(logprob):
    group = BeamGroup(2, 8)
    assert [s.token for s in advance_once(group, logprob, -1.0, logprob)] == [1]
    assert group.advance([Hypothesis([1], [-1.0])], [[0]], [[logprob]]) == []
    assert group.done and group.best == []


def test_a_logprob_rounded_above_zero_counts_as_zero():
    group = BeamGroup(1, 8)
    assert advance_once(group, 1e-7) == [(0, 0, 0.0)]


@pytest.mark.parametrize("stops, reason", [({1}, FinishReason.STOP), ((), FinishReason.LENGTH)])
def test_a_finished_hypothesis_says_all_about_itself(stops, reason):
    group = BeamGroup(1, 2, length_penalty=2.0, stop_token_ids=stops)
    advance_once(group, -1.0)
    assert group.advance([Hypothesis([0], [-1.0])], [[1]], [[-0.5]]) == []
    assert group.done
    assert group.best == [Beam([0, 1], "", [-1.0, -0.5], -1.5 / 4, reason)]


def test_early_stopping_leaves_live_hypotheses_out_even_in_the_last_step():
    group = BeamGroup(1, 1, early_stopping=True, length_penalty=0.0, stop_token_ids={0})
    advance_once(group, -1.0, -1.0)
    assert [hypothesis.finish_reason for hypothesis in group.best] == [FinishReason.STOP]


def test_a_request_is_a_hypothesis():
    request = Request(0, [7, 8], SamplingParams(), seed=0)
    group = BeamGroup(1, 2)
    group.advance([request], [[5, 6]], [[-1.0, -2.0]])
    request.tokens.append(5)
    request.logprobs.append(-1.0)
    group.advance([request], [[6]], [[-0.5]])
    assert [hypothesis.tokens for hypothesis in group.best] == [[5, 6]]


@pytest.mark.parametrize("stops, expected", [((), 8), ({1}, 8), ({1, 2}, 12), ({1, 2, 3}, 16)])
def test_enough_candidates_are_asked_for(stops, expected):
    assert BeamGroup(4, 8, stop_token_ids=stops).num_candidates == expected


@pytest.mark.parametrize("num_stops", [1, 2, 3])
def test_the_candidates_asked_for_are_as_good_as_the_whole_vocabulary(num_stops):
    stops = set(range(num_stops))
    for seed in range(20):
        model = TableModel(vocab=30, seed=seed)
        narrow, wide = (BeamGroup(2, 6, stop_token_ids=stops) for _ in range(2))
        search(narrow, model)
        search(wide, model, width=30)
        assert narrow.best == wide.best


@pytest.mark.parametrize("penalty", [-250.0, 250.0])
def test_the_extreme_penalties_can_be_computed(penalty):
    group = BeamGroup(2, 16, penalty, stop_token_ids={0})
    search(group, TableModel(vocab=4, seed=0))
    assert all(math.isfinite(hypothesis.score) for hypothesis in group.best)


@pytest.mark.parametrize(
    "tokens, logprobs", [([[1]], [[-1.0, -2.0]]), ([1], [-1.0]), ([[1], [2]], [[-1.0], [-2.0]])]
)
def test_candidates_that_do_not_fit_the_search_are_noticed(tokens, logprobs):
    with pytest.raises(AssertionError):
        BeamGroup(2, 2).advance([Hypothesis()], tokens, logprobs)


def test_steps_that_do_not_fit_the_search_are_noticed():
    group = BeamGroup(2, 2)
    with pytest.raises(AssertionError, match="not the survivors of the last step"):
        group.advance([Hypothesis([1], [-1.0])], [[1]], [[-1.0]])
    advance_once(group, -1.0, -2.0)
    with pytest.raises(AssertionError, match="not the survivors of the last step"):
        group.advance([Hypothesis([0], [-1.0])], [[1]], [[-1.0]])
    beams = [Hypothesis([0], [-1.0]), Hypothesis([1], [-2.0])]
    group.advance(beams, [[1], [1]], [[-1.0], [-1.0]])
    with pytest.raises(AssertionError, match="after the end of the search"):
        group.advance([Hypothesis()], [[1]], [[-1.0]])
