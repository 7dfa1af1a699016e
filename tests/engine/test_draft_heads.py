"""A head drafts from the hidden states of every kind of step, and changes no token."""

import random

import numpy as np
import pytest

from mlx_paged import Engine, SamplingParams
from mlx_paged.kv.memory import memory_in_use
from mlx_paged.runner import pooled_drafter
from mlx_paged.scheduler.pace import Pace
from mlx_paged.scheduler.step import StepWork
from tests.support.models.eagle3_files import (
    Eagle3Reference,
    random_head,
    target_states,
    write_head,
)
from tests.support.models.tiny_models import VOCAB, tiny_model
from tests.support.simulation.injected_drafts import take_every_guess
from tests.support.simulation.schedules import run_schedule

LAYERS = (1, 2, 3)


class Watched:
    """An engine whose head is compared with a reference at each proposal.

    Attributes:
        origins: of each proposal the first position whose states the head has, by request id.
        computed: tokens that the head read, by proposal.
    """

    def __init__(self, folder, **options):
        target = self.target = tiny_model("llama")
        tensors = write_head(
            folder,
            target_width=64,
            vocab_size=VOCAB,
            eagle_aux_hidden_state_layer_ids=[*LAYERS],
        )
        self.reference = Eagle3Reference(tensors)
        self.table = np.array(target.model.embed_tokens.weight, np.float64)
        options = {"block_size": 4, "num_blocks": 99, "prefill_chunk": 7} | options
        self.engine = Engine(target, draft_head=str(folder), **options)
        take_every_guess(self.engine.scheduler.decoding)
        self.drafter = self.engine.scheduler.decoding.drafters[0]
        self.origins: list[dict[int, int]] = []
        self.computed: list[int] = []
        self._propose, self.drafter.propose = self.drafter.propose, self.propose

    def propose(self, requests, depths):
        before = {i: d.num_computed for i, d in self.drafter._drafted.items()}
        guesses = self._propose(requests, depths)
        drafted = self.drafter._drafted
        self.origins.append({i: each.origin for i, each in drafted.items()})
        self.computed.append(sum(d.num_computed - before.get(i, 0) for i, d in drafted.items()))
        for request, own in zip(requests, guesses, strict=True):
            if not own:
                continue
            first = drafted[request.id].origin
            states = target_states(self.target, request.tokens[:-1], LAYERS)
            states = [each[first:] for each in states]
            text = request.tokens[first:]
            expected, margin = self.reference.guesses(states, text, self.table, len(own))
            assert own == expected or margin < 1e-3, (own, expected, margin)
        return guesses


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_the_same_prompt_again_finds_the_head_s_keys(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(2):
        watched.engine.generate([prompt(23)], SamplingParams(max_tokens=6))
    assert watched.drafter._allocator.prefix_hit_tokens >= 20
    assert all(origin == 0 for each in watched.origins for origin in each.values())


def test_prompts_that_differ_behind_a_block_have_guesses_of_their_own(tmp_path):
    """The entry of the first token behind a block is not made of the block's states."""
    watched = Watched(tmp_path)
    plain = Engine(watched.target, num_blocks=99, prefix_cache=False)
    for other in (1, 2):
        asked, params = [[*prompt(8), other, 3, 4]], SamplingParams(max_tokens=12)
        (done,) = watched.engine.generate(asked, params)
        (alone,) = plain.generate(asked, params)
        assert done.tokens == alone.tokens and done.drafts > 4
    assert done.cached_prompt_tokens == 8
    assert watched.origins[-1].popitem()[1] == 8, "the state before the ninth token is not there"


def test_prompts_that_differ_in_the_first_token_share_nothing(tmp_path):
    watched = Watched(tmp_path)
    for first in (1, 2):
        watched.engine.generate([[first, *prompt(12)]], SamplingParams(max_tokens=4))
    assert watched.drafter._allocator.prefix_hit_tokens == 0


def test_a_hit_that_lacks_the_head_s_keys_begins_the_head_s_attention_there(tmp_path):
    watched = Watched(tmp_path)
    params, asked = SamplingParams(max_tokens=6), prompt(23)
    watched.engine.generate([asked], SamplingParams(max_tokens=6, speculate=False))
    computed = watched.engine.stats.prompt_tokens
    (done,) = watched.engine.generate([asked], params)
    assert watched.engine.stats.prompt_tokens - computed <= 4, "the model computes nothing again"
    assert done.drafts and done.cached_prompt_tokens >= 20
    origins = {origin for each in watched.origins for origin in each.values()}
    assert len(origins) == 1 and min(origins) >= done.cached_prompt_tokens


def test_tokens_decoded_without_drafts_are_read_later(tmp_path):
    watched = Watched(tmp_path)
    speculation = watched.engine.scheduler.decoding
    whole, speculation._depths = speculation._depths, lambda likely: {}
    request_id = watched.engine.add_request(prompt(11), max_tokens=30)
    for _ in range(12):
        watched.engine.step()
    assert not watched.origins
    speculation._depths = whole
    while watched.engine.has_work:
        watched.engine.step()
    assert watched.origins[0] == {request_id: 0} and watched.computed[0] > 15


def test_states_that_are_not_kept_any_more_are_not_needed(tmp_path):
    watched = Watched(tmp_path)
    watched.drafter._kept._most_rows = 5
    asked = [prompt(20, seed) for seed in range(3)]
    done = watched.engine.generate(asked, SamplingParams(max_tokens=10))
    plain = Engine(watched.target, num_blocks=99).generate(asked, SamplingParams(max_tokens=10))
    assert [each.tokens for each in done] == [each.tokens for each in plain]
    origins = [origin for each in watched.origins for origin in each.values()]
    assert origins and min(origins) > 5
    watched.drafter.pooled.check_integrity()


@pytest.mark.parametrize("compile", [True, False])
def test_the_states_of_compiled_decodes_are_those_of_plain_ones(tmp_path, compile):
    watched = Watched(tmp_path, compile=compile)
    assert (watched.engine._models.pooled.runner.compiled is not None) == compile
    asked = [prompt(5, seed) for seed in range(3)]
    params = SamplingParams(max_tokens=14)
    done = watched.engine.generate(asked, params)
    plain = Engine(watched.target, num_blocks=99, compile=False).generate(asked, params)
    assert [each.tokens for each in done] == [each.tokens for each in plain]
    assert sum(each.drafts for each in done) > 10


def test_the_pool_and_the_weights_of_a_head_are_part_of_the_budget(tmp_path):
    target, options = tiny_model("llama"), {"block_size": 4, "kv_memory": 10**6}
    plain, headed = (
        Engine(target, **options),
        Engine(target, draft_head=random_head(target), **options),
    )
    both = headed._models.both
    assert headed._models.budget.weights > plain._models.budget.weights
    assert sum(each.pool.nbytes for each in both) <= 10**6
    rooms = [each.pool.num_blocks // each.plan.width for each in both]
    assert rooms[0] == rooms[1] > 0


def test_requests_get_the_room_that_the_head_s_keys_leave(tmp_path):
    """The pool of the model and that of the head have the same tokens, within one bound."""
    target, options = tiny_model("llama"), {"block_size": 4, "kv_memory": 60_000}
    plain = Engine(target, **options)
    headed = Engine(target, draft_head=random_head(target), **options)
    rooms = []
    for engine in (plain, headed):
        blocks = engine.manager.pool.num_blocks // engine.manager.plan.width
        rooms.append(4 * blocks)
        sizes = [4 * each.plan.width * each.pool.block_bytes for each in engine._models.both]
        assert blocks == 60_000 // (sum(sizes) // 4)
    assert rooms[1] < rooms[0]
    too_long = prompt(rooms[1] + 1)
    with pytest.raises(ValueError, match="blocks"):
        headed.add_request(too_long, max_tokens=1)
    assert len(plain.generate([too_long], max_tokens=1)[0].tokens) == 1
    take_every_guess(headed.scheduler.decoding)
    (done,) = headed.generate([prompt(rooms[1] - 8)], max_tokens=8, ignore_eos=True)
    assert len(done.tokens) == 8
    assert sum(each.pool.nbytes for each in headed._models.both) <= 60_000


def test_n_grams_and_a_head_draft_beside_each_other(tmp_path):
    """Guesses of n-grams replace those of the head where the text repeats itself."""
    watched = Watched(tmp_path, speculate="ngram", num_draft_tokens=2)
    speculation = watched.engine.scheduler.decoding
    speculation._plain = lambda decodes: (StepWork(len(decodes), 0), 0.01, 0.0001)
    ngrams = speculation.drafters[1]
    of_ngrams, propose = list[int](), ngrams.propose
    ngrams.propose = lambda *given: of_ngrams.append(1) or propose(*given)
    asked = [prompt(9), [*prompt(6, 1), *prompt(6, 1)], prompt(12, 2)]
    params = SamplingParams(max_tokens=40)
    done = watched.engine.generate(asked, params)
    plain = Engine(watched.target, num_blocks=99).generate(asked, params)
    assert [each.tokens for each in done] == [each.tokens for each in plain]
    assert of_ngrams and watched.origins, "both guess"
    assert len(speculation.by_depth) == ngrams.num_tokens > 2


def test_what_a_prompt_takes_is_no_cost_of_a_draft(tmp_path, monkeypatch):
    """Each token that the head reads or guesses takes a second of this clock."""
    watched, now, paces = Watched(tmp_path), [0.0], list[Pace]()
    drafter, launch = watched.drafter, watched.drafter._launch
    monkeypatch.setattr(pooled_drafter.time, "perf_counter", lambda: now[0])

    def slow(planning, before):
        paces.append(drafter.pace)
        now[0] += sum(map(len, planning.spans))
        return launch(planning, before)

    drafter._launch = slow
    watched.engine.generate([prompt(40)], SamplingParams(max_tokens=20))
    assert paces[:3] == [Pace()] * 3, "the first proposal is under way, of three drafts"
    assert all(pace.of_pass + pace.of_guess < 2 for pace in paces), "a prompt takes 40"
    assert paces[-1].of_token > 0.5


def test_states_that_wait_for_a_head_are_in_the_ledger_and_in_the_budget(tmp_path):
    row = 4 * 64 * len(LAYERS)  # bytes of a token's states
    in_use = memory_in_use()
    watched = Watched(tmp_path, num_blocks=200)
    engine, rows = watched.engine, 4096 * row
    both = engine._models.both
    taken = sum(each.budget.pool for each in both) - sum(each.pool.nbytes for each in both)
    assert taken == rows
    assert memory_in_use() - in_use > rows
    engine.scheduler.decoding._depths = lambda likely: {}
    engine.add_request(prompt(30), max_tokens=9)
    while engine.has_work:
        engine.step()
    line = engine.metrics()["memory"]["held"]["hidden_states"]
    kept = [a for each in watched.drafter._kept._forwards for a in each.states.arrays]
    assert line["bytes"] == sum(each.nbytes for each in kept) >= 30 * row
    assert line["limit"] == rows


def test_drafts_are_counted_by_depth(tmp_path):
    watched = Watched(tmp_path)
    watched.engine.generate([prompt(8)], SamplingParams(max_tokens=12))
    stats = watched.engine.stats
    computed, right = (sum(pair[i] for pair in stats.drafts_by_depth) for i in (0, 1))
    assert (computed, right) == (stats.drafts, stats.accepted_drafts) and computed > 5
    assert len(stats.drafts_by_depth) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"draft_model": tiny_model("llama")},
            "draft_head is .*: expected None beside draft_model",
        ),
        ({"draft_head": "/nowhere"}, "draft head /nowhere: expected a folder"),
    ],
)
def test_what_cannot_be_with_a_head_is_refused(options, message):
    target = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        Engine(target, num_blocks=8, **({"draft_head": random_head(target)} | options))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["heads", "mtp heads"])
@pytest.mark.parametrize("first", [9, 24, 28, 36])
def test_random_schedules_give_the_tokens_of_requests_alone(first, kind):
    """With forks, samples, beams, preemptions, prefix hits, faults, recurrent layers, disks,
    grammars and n-grams."""
    drafts = 0
    for index in range(first, first + 3):
        counts, failure = run_schedule(kind, 11, index)
        assert failure is None, f"{failure!r} in schedule {index}"
        assert counts["mismatches"] == counts["leaked_blocks"] == 0
        drafts += counts["drafts"]
    assert drafts > 8
