"""What a step does once, and what it does not do again: counted, never timed."""

import sys
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import Engine, SamplingParams, ops
from mlx_paged.kv.block_tables import BlockTables
from mlx_paged.runner.batch import Batch
from mlx_paged.runner.skip_unsampled import WORTH_SKIPPING
from mlx_paged.sampling.columns import SamplingRows
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model
from tests.support.ops.attention_paths import attending_by

LAYERS = 3
NUM_WAITING = 4096


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama", num_hidden_layers=LAYERS)


class Calls:
    """Arguments of calls, by name, since :meth:`clear`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[str, list[tuple[Any, ...]]] = {}
        self._monkeypatch = monkeypatch

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        made = self.made.setdefault(name, [])

        def noted(*args: Any, **options: Any) -> Any:
            made.append(args)
            return original(*args, **options)

        self._monkeypatch.setattr(owner, name, noted)

    def clear(self) -> None:
        for made in self.made.values():
            made.clear()

    def num(self) -> Counter[str]:
        return Counter({name: len(made) for name, made in self.made.items() if made})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def prompts(num: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(VOCAB, size=(num, length)).tolist()


def decoding(model: nn.Module, num: int, **options: Any) -> Engine:
    """An engine whose `num` requests have got their first tokens."""
    engine = Engine(model, block_size=8, num_blocks=200, max_running=16, lookahead=True)
    for i, prompt in enumerate(prompts(num, 11)):
        engine.add_request(prompt, max_tokens=60, seed=i, **options)
    for _ in range(2):
        engine.step()
    return engine


def test_all_layers_share_the_arrays_of_a_step_which_is_evaluated_once(model, calls):
    engine = decoding(model, 4)
    # a chunk beside the decodes, too short for the last layer to be called twice
    engine.add_request(prompts(1, WORTH_SKIPPING, seed=1)[0], max_tokens=5)
    calls.watch(ops, "append_kv")
    calls.watch(ops, "attend")
    calls.watch(ops, "attend_known")
    calls.watch(mx, "async_eval")
    calls.watch(mx, "eval")
    calls.watch(Batch, "__init__")
    seen = []
    for _ in range(3):
        calls.clear()
        with attending_by("paged"):
            engine.step()
        forwards = [args[7] for args in calls.made["append_kv"]]
        forwards += [args[3] for args in calls.made["attend_known"]]
        tables = [tuple(map(id, args[2:4])) for args in calls.made["attend"]]
        assert all(each is forwards[0] for each in forwards)
        assert len(set(tables)) <= 1
        made = calls.made["attend"] + calls.made["attend_known"]
        assert len(made) == LAYERS
        seen.append(made[0][0].shape[0] > 5)
        assert calls.num() - Counter(attend=LAYERS, attend_known=LAYERS) == {
            "append_kv": LAYERS,
            "async_eval": 1 + sum(seen[-2:-1]),  # the rest of a step that is held back
            "eval": 1,
            "__init__": 1,
        }
    assert sorted(seen) == [False, False, True]  # one step has a chunk


def test_decodes_of_an_unchanged_batch_read_no_token_on_the_host(model, calls):
    """The tokens that the step before is choosing are the next inputs, as they are."""
    engine = decoding(model, 4)
    calls.watch(mx, "concatenate")
    calls.watch(mx, "take")
    calls.watch(Batch, "__init__")
    for _ in range(3):
        engine.step()
        batch = calls.made["__init__"][-1][0]
        coming = engine._pipeline._under_way.launched.coming
        assert batch.samples_all and batch.newest is batch.tokens
        assert coming.tokens.shape == batch.tokens.shape == (4,)
    assert calls.num() == {"__init__": 3}  # and no row of the model's output is picked


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Ids of the requests for whom columns of options were made, each time."""
    made: list[list[int]] = []
    original = SamplingRows.__init__

    def init(self, requests, vocab):
        made.append([request.id for request in requests])
        original(self, requests, vocab)

    monkeypatch.setattr(SamplingRows, "__init__", init)
    yield made


DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2}


def test_options_are_laid_out_once_for_as_long_as_the_same_requests_run(model, composed, calls):
    engine = decoding(model, 4, **DRAWN)
    assert [0, 1, 2, 3] in composed
    composed.clear()
    calls.watch(BlockTables, "rows")
    for _ in range(20):
        assert len(engine.step()) == 4
    assert composed == [] and calls.num() == {}


def test_options_are_laid_out_anew_when_somebody_comes_forks_or_goes(model, composed):
    engine = decoding(model, 2, **DRAWN)
    composed.clear()
    child = engine.fork(0, params=SamplingParams(max_tokens=30, temperature=0.0))
    engine.step()
    engine.step()
    joined = engine.add_request(prompts(1, 5, seed=3)[0], max_tokens=30)
    for _ in range(3):
        engine.step()
    engine.abort(1)
    for _ in range(3):
        engine.step()
    assert composed == [
        [0, 1, child],
        [0, 1, child, joined],
        [0, child, joined],
    ]


def test_another_request_in_a_row_brings_its_own_parameters(model):
    """One ends, the next one takes its place: greedy where the other was drawn."""
    engine = Engine(model, block_size=8, num_blocks=200, max_running=2, lookahead=True)
    first, second = prompts(2, 9, seed=4)
    engine.add_request(prompts(1, 6)[0], max_tokens=40, temperature=50.0, seed=1)
    engine.add_request(first, max_tokens=5, temperature=50.0, seed=2)
    greedy = engine.add_request(second, max_tokens=12)
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert done[greedy].tokens == solo_greedy(model, second, 12)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("blocks", [14, 200], ids=["preempted", "at ease"])
def test_what_is_kept_between_steps_changes_no_token(model, options, blocks):
    params = [SamplingParams(max_tokens=25, seed=i, **options) for i in range(5)]
    asked = prompts(5, 10, seed=5)
    crowded = Engine(model, block_size=8, num_blocks=blocks, max_running=5, lookahead=True)
    together = crowded.generate(asked, params)
    for prompt, each, completion in zip(asked, params, together, strict=True):
        alone = Engine(model, block_size=8, num_blocks=200, lookahead=False)
        assert alone.generate([prompt], each)[0].tokens == completion.tokens
    assert (crowded.stats.preemptions > 0) == (blocks == 14)


def num_python_calls(engine: Engine) -> int:
    """Calls of Python functions in the next step."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return num_calls


def test_thousands_of_waiting_requests_cost_a_step_nothing(model):
    engines = []
    for num_waiting in (1, NUM_WAITING):
        engine = Engine(model, block_size=8, num_blocks=400, max_running=4, lookahead=True)
        for i in range(4 + num_waiting):
            engine.add_request([i % VOCAB] * 11, max_tokens=60)
        for _ in range(3):
            engine.step()
        assert len(engine.scheduler.waiting) == num_waiting
        engines.append(engine)
    # Some calls are made once in a process, others in steps that a busy machine delays, and some
    # are left out where a result is early: in most steps both engines make as many.
    steps = [[num_python_calls(engine) for engine in engines] for _ in range(50)]
    assert median(many - few for few, many in steps) == 0


def test_sampling_calls_no_python_for_each_row(model):
    """Twice the rows, the same calls, whatever the options."""
    counts = []
    for rows in (4, 8):
        engine = decoding(model, rows, **DRAWN)
        sampler, sampler_calls = engine.runner.sampler, []

        def counted(*args: Any, sampler=sampler, sampler_calls=sampler_calls) -> Any:
            num_calls = 0

            def count(frame: Any, event: str, argument: Any) -> None:
                nonlocal num_calls
                num_calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                return sampler(*args)
            finally:
                sys.setprofile(None)
                sampler_calls.append(num_calls)

        engine.runner.sampler = counted
        for _ in range(3):
            engine.step()
        counts.append(sampler_calls)
    assert counts[0] == counts[1]
