"""Every architecture of mlx-lm has mlx-lm's own logits, or is refused by name."""

import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged import Engine
from mlx_paged.runner import model_runner
from mlx_paged.scheduler.speculation import Speculation
from scripts.support_matrix import (
    AT_SNAPSHOTS,
    DOCUMENT,
    SERVED,
    document,
    names,
    support,
    support_of,
)
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, VARIANTS, VOCAB, build
from tests.support.simulation.injected_drafts import HalfRight

TOLERANCE = 1e-4
"""Largest difference of log-probabilities, relative to the largest of them."""

NUM_TOKENS = 6
CHUNK = 5
BLOCK_SIZE = 4
_rng = np.random.default_rng(0)
SHORT, MIDDLE, LONG = (_rng.integers(0, VOCAB, length).tolist() for length in (3, 9, 14))

TABLE = {
    cells[1]: cells
    for line in DOCUMENT.read_text().split("| architecture |")[1].splitlines()[2:]
    if (cells := [cell.strip() for cell in line.split("|")])
}
"""Rows of docs/support.md by name."""

INCONSISTENT = ("phi3small", "plamo3")
"""What mlx-lm computes in two ways with two outcomes: by another chunk, by a decode."""

IS_SERVED = [
    name for name, cells in TABLE.items() if cells[2] in SERVED and name not in INCONSISTENT
]


class Solo:
    """A model, and what mlx-lm computes for one sequence alone on its own cache."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = build(name)
        self.logprobs = cache(self._logprobs)

    def _logprobs(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
        """Log-probabilities ``[len(tokens), vocab]``: after the prompt, after each token but the
        last."""
        stock = make_prompt_cache(self.model)
        steps = [prompt, *((token,) for token in tokens[:-1])]
        rows = [self.model(mx.array([step]), cache=stock)[0, -1] for step in steps]
        logits = mx.stack(rows)
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def engine(self, **options) -> Engine:
        options = {"block_size": BLOCK_SIZE, "num_blocks": 64, "prefill_chunk": CHUNK} | options
        return Engine(self.model, **options)

    def error(self, prompt, completion) -> float:
        """How far a completion's log-probabilities are from mlx-lm's, relative."""
        assert len(completion.tokens) == NUM_TOKENS, completion.error
        expected = self.logprobs(tuple(prompt), tuple(completion.tokens))
        found = np.empty_like(expected)
        for row, top in zip(found, completion.top_logprobs, strict=True):
            tokens, logprobs = zip(*top, strict=True)
            row[list(tokens)] = logprobs
        return float(np.abs(found - expected).max() / np.abs(expected).max())


OPTIONS = {"max_tokens": NUM_TOKENS, "logprobs": VOCAB}


def assert_greedy(solo: Solo, prompt, completion) -> None:
    assert solo.error(prompt, completion) < TOLERANCE
    logprobs = solo.logprobs(tuple(prompt), tuple(completion.tokens))
    chosen = logprobs[np.arange(NUM_TOKENS), completion.tokens]
    assert (chosen >= logprobs.max(axis=-1) - TOLERANCE * np.abs(logprobs).max()).all()


def run(engine: Engine, arrivals: dict[int, list[list[int]]], disturb=lambda *_: None):
    """Prompts that arrive before the given steps; pairs of prompt and completion."""
    prompts, done, step = {}, [], 0
    while arrivals or engine.has_work:
        for prompt in arrivals.pop(step, ()):
            prompts[engine.add_request(prompt, **OPTIONS)] = prompt
        disturb(engine, step, list(prompts))
        outputs = engine.step()
        done += [(prompts[o.request_id], o.completion) for o in outputs if o.completion]
        step += 1
    return done


def write_noise(engine: Engine, blocks) -> None:
    """Noise in every slot of these blocks."""
    pool = engine.manager.pool
    for layer, shape in enumerate(pool.shapes):
        block_size = pool.k[layer].shape[2]
        slots = np.asarray(blocks, np.int32)[:, None] * block_size + np.arange(block_size)
        slots = mx.array(slots.ravel(), mx.int32)
        rows = [mx.random.normal((slots.size, shape.n_kv_heads, dim)) for dim in shape.row_dims]
        pool.write(layer, *rows, slots)
    mx.eval(pool.handles())  # nothing orders writes through two views of one memory


def overwrite_free_blocks(engine: Engine, step: int, ids: list[int]) -> None:
    write_noise(engine, engine.manager.allocator.store.free)


def overwrite_all_kv(engine: Engine, step: int, ids: list[int]) -> None:
    if step == 2:
        write_noise(engine, range(engine.manager.pool.num_blocks))


def swap_states(engine: Engine, step: int, ids: list[int]) -> None:
    """The state of one sequence in the place of another's."""
    if step == 2:
        held, allocator = engine.runner.states._held, engine.manager.allocator
        first, other = (allocator.state(request_id).id for request_id in ids[:2])
        held[first] = held[other]


one_in_twelve = pytest.mark.sampled(12)
"""Other architectures for each test."""


@pytest.fixture(scope="module", params=IS_SERVED)
def served(request) -> Solo:
    return Solo(request.param)


@one_in_twelve
def test_ragged_prompts_decode_together(served):
    for prompt, completion in run(served.engine(prefill_chunk=64), {0: [SHORT, MIDDLE, LONG]}):
        assert_greedy(served, prompt, completion)


@one_in_twelve
def test_chunked_prompts_arrive_while_others_decode(served):
    for prompt, completion in run(served.engine(), {0: [MIDDLE], 3: [SHORT, LONG]}):
        assert_greedy(served, prompt, completion)


@one_in_twelve
def test_the_last_layer_computes_sampled_tokens_alone(served, monkeypatch):
    monkeypatch.setattr(model_runner, "WORTH_SKIPPING", 1)
    for prompt, completion in run(served.engine(), {0: [MIDDLE], 3: [SHORT, LONG]}):
        assert_greedy(served, prompt, completion)


@one_in_twelve
def test_no_block_is_read_after_it_was_freed(served):
    engine = served.engine(lookahead=False, prefix_cache=False)
    for prompt, completion in run(engine, {0: [LONG, SHORT]}, overwrite_free_blocks):
        assert_greedy(served, prompt, completion)


def test_that_arrival_makes_mixed_steps():
    engine = Solo("llama").engine()
    launch, mixed = engine.runner.launch, []

    def record(step, before):
        mixed.append(step.work.decode_rows > 0 and step.work.chunk_tokens > 0)
        return launch(step, before)

    engine.runner.launch = record
    run(engine, {0: [MIDDLE], 3: [SHORT, LONG]})
    assert sum(mixed) >= 3


@one_in_twelve
def test_samples_of_one_prompt_part_ways(served):
    engine = served.engine()
    (samples,) = engine.sample([MIDDLE], 3, temperature=2.0, seed=0, **OPTIONS)
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    assert max(served.error(MIDDLE, sample) for sample in samples) < TOLERANCE
    assert engine.stats.cow_clones > 0
    assert engine.stats.prompt_tokens == len(MIDDLE), "the prompt was computed more than once"


@one_in_twelve
def test_prefixes_are_shared(served):
    """Recurrent layers keep a state where two prompts depart from each other."""
    engine = served.engine()
    engine.generate([LONG], max_tokens=1)
    for end in (SHORT, SHORT[::-1]):
        prompt = LONG[: 2 * BLOCK_SIZE] + end
        (completion,) = engine.generate([prompt], **OPTIONS)
        assert_greedy(served, prompt, completion)
        if end is not SHORT or not engine.scheduler.allocator.states.exist:
            assert completion.cached_prompt_tokens == 2 * BLOCK_SIZE


@one_in_twelve
def test_drafts_change_neither_tokens_nor_logits(served, monkeypatch):
    def three(speculation, likely):  # not as many as this machine's speed makes worthwhile
        left = {r: r.params.max_tokens - r.num_generated - 1 for r in likely}
        return {request: min(3, count) for request, count in left.items() if count > 0}

    monkeypatch.setattr(Speculation, "_depths", three)
    plain = run(served.engine(), {0: [MIDDLE], 2: [SHORT, LONG]})
    right = {len(prompt): completion.tokens for prompt, completion in plain}
    engine = served.engine(speculate="ngram")
    is_taken = TABLE[served.name][5] == "yes"
    assert (engine.scheduler.decoding.gives_several) == is_taken
    if is_taken:
        engine.scheduler.decoding.drafters[0] = HalfRight(right)
        for prompt, completion in run(engine, {0: [MIDDLE], 2: [SHORT, LONG]}):
            assert_greedy(served, prompt, completion)
        assert engine.stats.drafts > engine.stats.accepted_drafts > 1


@one_in_twelve
def test_a_disturbed_cache_is_noticed(served):
    decodes, prefixes = TABLE[served.name][2], TABLE[served.name][4]
    disturbances = [overwrite_all_kv] if decodes != "state only" else []
    disturbances += [swap_states] if prefixes == AT_SNAPSHOTS else []
    for disturb in disturbances:
        engine = served.engine(prefill_chunk=64, lookahead=False)
        ((prompt, completion), _) = run(engine, {0: [MIDDLE, LONG]}, disturb)
        assert prompt == MIDDLE and served.error(prompt, completion) > 10 * TOLERANCE


def test_values_that_a_model_clears_stay_in_the_pool():
    engine = Solo("deepseek_v32").engine()
    engine.generate([LONG], **OPTIONS)
    assert all(mx.any(values != 0).item() for values in engine.manager.pool.v)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("gpt_oss", "sliding_window"),
        ("deepseek_v32", "index_topk"),
        ("minimax_m3_vl", "index_topk_blocks"),
        ("llama4", "attention_chunk_size"),
    ],
)
def test_the_test_prompts_are_long_enough_for_limited_attention(name, option):
    limited, unlimited = (
        np.array(build(name, **changes)(mx.array([LONG]))) for changes in ({}, {option: 64})
    )
    assert np.abs(limited - unlimited).max() > 1e-2 * np.abs(unlimited).max()


def test_every_architecture_of_mlx_lm_is_in_the_table():
    (folder,) = mlx_lm.models.__path__
    has_model = re.compile(r"^(class Model\(|from .* import Model\b)", re.MULTILINE)
    sources = Path(folder).glob("*.py")
    models = {path.stem for path in sources if has_model.search(path.read_text())}
    assert models == set(ARCHITECTURES)
    assert set(TABLE) == set(ARCHITECTURES) | set(VARIANTS)


@pytest.mark.sampled(2)
def test_the_table_is_what_the_script_writes():
    text = document((name, support(name)) for name in names())
    assert text == DOCUMENT.read_text(), "run python -m scripts.support_matrix"


@pytest.mark.skipif(mx.metal.is_available(), reason="they may run here")
@pytest.mark.parametrize("name", NOT_ON_A_CPU)
def test_what_the_table_excuses_does_not_run_in_mlx_lm(name):
    with pytest.raises((RuntimeError, SystemExit)):
        mx.eval(build(name)(mx.array([SHORT])))


@pytest.mark.slow
@pytest.mark.parametrize("name", INCONSISTENT)
def test_what_mlx_lm_computes_in_two_ways_is_refused(name):
    model = build(name)
    rows = []
    for steps in ([LONG], [LONG[:-4], LONG[-4:]], [LONG[:-1], LONG[-1:]]):
        stock = make_prompt_cache(model)
        (*_, logits) = (model(mx.array([step]), cache=stock) for step in steps)
        rows.append(np.array(logits[0, -1, :VOCAB]))
    assert max(np.abs(row - rows[0]).max() for row in rows) > 1e-3 * np.abs(rows[0]).max()
    assert support_of(model).path == "refused"
