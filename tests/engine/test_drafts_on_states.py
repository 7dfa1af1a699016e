"""Drafts on recurrent layers: a wrong draft leaves nothing in any state."""

import random

import pytest

from mlx_paged import Engine, SamplingParams
from mlx_paged.request import Request
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models.architectures import VOCAB, build
from tests.support.simulation.injected_drafts import InjectedDrafter
from tests.support.simulation.solo_runs import MlxLmSolo, solo_run

pytestmark = pytest.mark.usefixtures("eager")


FAMILIES = ("jamba", "mamba", "mamba2", "qwen3_5", "nemotron_h", "lfm2", "kimi_linear", "rwkv7")
FAMILIES += ("recurrent_gemma", "falcon_h1", "baichuan_m1", "longcat_flash_ngram")
"""Mamba 1 and 2, gated delta nets, short convolutions, and states that only one module sees, that
two modules share, that the model itself keeps, and that no module can compute in rows."""

OTHERS = ("qwen3_next", "granitemoehybrid", "plamo2", "olmo_hybrid", "gear", "bailing_moe_linear")
OTHERS += ("bailing_hybrid", "bailing_moe_v3", "kimi_k3", "qwen3_5_moe", "prism_hadamard_qwen35")


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def engine_with(model, share: float, **options: object) -> Engine:
    """An engine whose drafts are right as often as `share` says, and many."""
    options = {"block_size": 4, "num_blocks": 200, "prefill_chunk": 7, "prewarm": False} | options
    engine = Engine(model, **options)
    drafter, scheduler = InjectedDrafter(random.Random(1), MlxLmSolo(model, VOCAB), share), None
    scheduler = engine.scheduler
    scheduler.decoding = Speculation([drafter], scheduler.allocator, scheduler.budget)
    return engine


def num_behind(engine: Engine, request: Request) -> int:
    allocator = engine.scheduler.allocator
    if request.id not in allocator:
        return 0
    return request.num_computed - allocator.begins_at(request.id, request.num_computed)


def check_alone(model, asked, params, done) -> None:
    """Each completion is what mlx-lm gives for the request alone."""
    solo = MlxLmSolo(model, VOCAB)
    for prompt, param, completion in zip(asked, params, done, strict=True):
        expected = solo_run(solo, prompt, param, param.seed, b"")
        pairs = zip(expected.tokens, completion.tokens, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert first is None or expected.margins[first] < 1e-4, (completion, expected)


def drawn(count: int, temperature: float = 0.8) -> list[SamplingParams]:
    """Greedy ones and others."""
    chosen = (0.0, temperature)
    return [SamplingParams(max_tokens=20, temperature=chosen[i % 2], seed=i) for i in range(count)]


def check_architecture(name: str, share: float) -> None:
    model = build(name)
    engine = engine_with(model, share)
    done = engine.generate(prompts(4), drawn(4))
    check_alone(model, prompts(4), drawn(4), done)
    drafted, accepted = engine.stats.drafts, engine.stats.accepted_drafts
    assert engine.stats.faults == 0
    assert drafted > 20 and (share < 1) == (accepted < drafted)
    if share == 1.0:
        assert engine.stats.steps < 4 * 20 / 2, "drafts save steps"
    engine.scheduler.allocator.check_integrity()
    assert engine.scheduler.allocator.store.blocks_in_use == 0
    kept = {*engine.scheduler.allocator.states.snapshots.state_ids()}
    assert engine.runner.states._held.keys() == kept, "states are left behind"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_tokens_are_mlx_lms(architecture):
    check_architecture(architecture, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("architecture", [*FAMILIES, *OTHERS])
def test_the_tokens_are_mlx_lms_however_many_are_right(architecture, share):
    check_architecture(architecture, share)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHERS)
def test_the_tokens_of_the_other_architectures_are_mlx_lms(architecture):
    check_architecture(architecture, 0.6)


@pytest.mark.parametrize("architecture", ["qwen3_5", "jamba"])
def test_a_preempted_request_starts_again_from_a_right_state(architecture):
    """Requests lose their blocks while their states are behind."""
    model, behind = build(architecture), 0
    engine = engine_with(model, 0.5, num_blocks=400, lookahead=False)
    asked = [[*prompts(4)[3], i] for i in range(4)]
    params = [SamplingParams(max_tokens=24, seed=i) for i in range(4)]
    ids = [engine.add_request(*pair) for pair in zip(asked, params, strict=True)]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        running = list(engine.scheduler.running.values())
        for request in [request for request in running if num_behind(engine, request)]:
            if request.num_preempted < 3:
                engine.scheduler._preempt(request)
                behind += 1
    check_alone(model, asked, params, [done[request_id] for request_id in ids])
    assert behind > 4 and engine.stats.preemptions == behind and engine.stats.faults == 0
    assert engine.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_a_fork_goes_on_where_its_parents_states_are_behind(architecture):
    model, behind = build(architecture), 0
    engine, solo = engine_with(model, 0.4), MlxLmSolo(model, VOCAB)
    params = SamplingParams(max_tokens=12)
    for count in range(3, 12, 2):
        parent = engine.add_request(prompts(1)[0], SamplingParams(max_tokens=30), keep=True)
        for _ in range(count):
            engine.step()
        child = engine.fork(parent, [3] * (count % 2), params)
        behind += num_behind(engine, engine.request(child)) > 0
        start, done = list(engine.request(child).tokens), {}
        while engine.has_work:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        assert done[child].tokens == solo_run(solo, start, params, 0, b"").tokens
        engine.release(parent)
    assert behind > 1, "no parent was behind"
    assert engine.stats.faults == 0


@pytest.mark.parametrize("architecture", ["qwen3_5", "nemotron_h"])
def test_the_state_that_a_request_leaves_is_one_of_its_tokens(architecture):
    """The next turn of a chat begins there, even if the last draft was wrong."""
    model, cached = build(architecture), 0
    engine = engine_with(model, 0.5, num_blocks=400)
    for i in range(8):
        prompt = [*prompts(2)[1], i]
        (first,) = engine.generate([prompt], [SamplingParams(max_tokens=9 + i, seed=i)])
        turn = [*prompt, *first.tokens, 7, 8, 9]
        (done,) = engine.generate([turn], [SamplingParams(max_tokens=8, seed=0)])
        check_alone(model, [turn], [SamplingParams(max_tokens=8, seed=0)], [done])
        cached += done.cached_prompt_tokens > len(prompt)
    assert cached > 2, "hardly any answer was found"
    assert engine.stats.faults == 0


def test_decodes_drafts_and_chunks_are_one_forward(monkeypatch):
    model, kinds = build("qwen3_5"), set()
    forward = ModelRunner._forward

    def counted(runner, batch):
        lengths = [len(span) for span in batch.spans]
        drafts = any(span.further for span in batch.spans)
        kinds.add((1 in lengths, drafts, any(span.leaves[1:] for span in batch.spans)))
        runner.count = getattr(runner, "count", 0) + 1
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "_forward", counted)
    engine = engine_with(model, 0.6, prefill_chunk=16)
    for i, prompt in enumerate(prompts(6)):
        engine.add_request(prompt, SamplingParams(max_tokens=20, seed=i))
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.runner.count == engine.stats.steps, "a step has several forwards"
    assert engine.stats.faults == 0
    assert (True, True, True) in kinds, "nothing was mixed"


@pytest.mark.parametrize("pair", [("qwen3_5", "qwen3_5"), ("llama", "jamba"), ("lfm2", "mamba2")])
def test_a_draft_model_may_be_recurrent(pair):
    model, draft_model = map(build, pair)
    options = {"block_size": 4, "num_blocks": 200, "prefill_chunk": 7, "prewarm": False}
    engine = Engine(model, draft_model=draft_model, num_draft_tokens=4, **options)
    done = engine.generate(prompts(5), drawn(5))
    check_alone(model, prompts(5), drawn(5), done)
    drafter = engine.scheduler.decoding.drafters[0]
    assert engine.stats.drafts > 20 and engine.stats.faults == 0
    if pair[0] == pair[1]:
        assert engine.stats.accepted_drafts > 0.95 * engine.stats.drafts
    assert not drafter._drafted and not drafter._runner.states._held
    assert drafter._allocator.store.blocks_in_use == 0
    drafter._allocator.check_integrity()
