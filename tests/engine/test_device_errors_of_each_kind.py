"""No wrong token, whatever is computed, where a random command buffer of a random step fails."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_paged import Engine, ops, patched_mlx_lm
from mlx_paged.kv.block_bytes import bytes_of
from mlx_paged.runner import model_runner
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.scheduler.step import DeviceError
from tests.support.commands.server_harness import demo
from tests.support.engine import disk_engines
from tests.support.engine.metal_queue import BUFFERS, MESSAGE, MetalQueue
from tests.support.engine.structured_runs import SCHEMA
from tests.support.models.tiny_models import VOCAB, tiny_model

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (9, 25, 6)]
SHARED = [PROMPTS[1] + RNG.integers(0, VOCAB, n).tolist() for n in (3, 7)]

Run = Callable[[], tuple[list[Any], int]]
"""Returns tokens, and the number of steps that failed."""


def engine_of(model_type: str, **options: Any) -> Engine:
    return Engine(tiny_model(model_type), block_size=4, num_blocks=128, prewarm=False, **options)


def branches() -> tuple[list[Any], int]:
    """Samples, forks of a kept request, beams."""
    engine = engine_of("llama")
    done = {}
    ids = engine.add_samples(PROMPTS[0], 3, temperature=1.0, seed=5, max_tokens=6)
    parent = engine.add_request(PROMPTS[1], max_tokens=4, keep=True)
    ids += [parent, engine.add_beam_search(PROMPTS[2], 3, max_tokens=5)]
    for is_forked in (False, True):
        while engine.has_work:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        if not is_forked:
            ids += [engine.fork(parent, suffix, max_tokens=4) for suffix in ([], [3, 4])]
    found = [done[i].beams or [done[i]] for i in ids]
    return [[each.tokens for each in group] for group in found], engine.stats.faults


def grammars() -> tuple[list[Any], int]:
    """Some tokens are forced, and computed together."""
    engine = Engine(*demo(), num_blocks=256, prewarm=False)
    options = {"max_tokens": 24, "json_schema": SCHEMA}
    done = engine.generate(["def f(x):", "import os\n"], **options)
    return [each.tokens for each in done], engine.stats.faults


def drafts(**options: Any) -> tuple[list[Any], int]:
    engine = engine_of("llama", **options)
    done = engine.generate([[5, 6, 7, 8] * 5, *PROMPTS], max_tokens=9)
    return [each.tokens for each in done], engine.stats.faults


def prefixes(model_type: str) -> tuple[list[Any], int]:
    """Prompts that find what others have left in the pool."""
    engine = engine_of(model_type)
    done = [engine.generate([prompt], max_tokens=5)[0] for prompt in (PROMPTS[1], *SHARED)]
    return [each.tokens for each in done], engine.stats.faults


def disk() -> tuple[list[Any], int]:
    """Prompts that another engine finds on the disk."""
    model, found, num_faults = tiny_model("llama"), [], 0
    with TemporaryDirectory() as directory:
        for _ in range(2):
            engine = disk_engines.make_engine(model, Path(directory))
            engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
            for prompt in (PROMPTS[1], *SHARED):
                found += [each.tokens for each in engine.generate([prompt], max_tokens=5)]
                while engine.copy_when_idle():
                    pass
            engine.close()
            num_faults += engine.stats.faults
    return found, num_faults


KINDS: dict[str, Run] = {
    "branches": branches,
    "grammars": grammars,
    "a draft model": lambda: drafts(draft_model=tiny_model("llama", seed=1)),
    "n-grams": lambda: drafts(speculate="ngram"),
    "prefixes": lambda: prefixes("llama"),
    "states": lambda: prefixes("jamba"),
    "windows": lambda: prefixes("gemma3_text"),
    "a disk": disk,
}


@cache
def expected(kind: str) -> tuple[list[Any], int]:
    """Tokens without a failure, and the number of steps."""
    with pytest.MonkeyPatch.context() as patch:
        queue = MetalQueue(0, 0, seed=0)
        queue.install(patch)
        tokens, faults = KINDS[kind]()
    assert faults == queue.failures == 0
    return tokens, queue.launches


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_one_failure_gives_no_wrong_token(monkeypatch, kind, seed):
    tokens, num_steps = expected(kind)
    random = Random(seed)
    queue = MetalQueue(random.randint(1, num_steps), random.randrange(BUFFERS), seed)
    queue.install(monkeypatch)
    found, faults = KINDS[kind]()
    assert found == tokens
    assert (queue.failures, queue.told, faults) == (1, 1, 1)


def test_what_a_device_copies_for_a_disk_while_it_fails_is_not_written(monkeypatch, tmp_path):
    model = tiny_model("llama")
    engine = disk_engines.make_engine(model, tmp_path)
    right = engine.generate([PROMPTS[1]], max_tokens=5)[0].tokens
    transfer, failures = ModelRunner._transfer, iter([MESSAGE])

    def wrong(runner: ModelRunner, stores: Any, loads: Any) -> None:
        transfer(runner, stores, loads)
        for stored in stores:
            stored.payload = partial(np.full_like, stored.payload(), 7)

    def end() -> None:
        for message in failures:
            raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_transfer", wrong)
        patch.setattr(ops.metal, "end_of_work", lambda: end)
        assert not engine.copy_when_idle()
    engine.close()
    again = disk_engines.make_engine(model, tmp_path)
    again.scheduler.tier._seconds_to_compute = lambda start, stop: 1.0
    assert again.generate([PROMPTS[1]], max_tokens=5)[0].tokens == right
    again.close()


def test_an_error_that_is_told_where_a_copy_for_a_disk_is_read_is_not_hidden(monkeypatch, tmp_path):
    """The step under way may be what failed."""
    engine = disk_engines.make_engine(tiny_model("llama"), tmp_path)
    messages = [MESSAGE]

    def read(*args: Any) -> Any:
        if messages:
            raise RuntimeError(messages.pop())
        return bytes_of(*args)

    monkeypatch.setattr(model_runner, "bytes_of", read)
    expected = engine.generate([PROMPTS[1]], max_tokens=5)[0].tokens
    assert messages and engine.runner.error is None
    while engine.copy_when_idle():
        pass
    assert isinstance(engine.runner.error, DeviceError)
    assert engine.generate([PROMPTS[1]], max_tokens=5)[0].tokens == expected
    assert engine.stats.faults == 1
    engine.close()


@pytest.fixture
def tells_once(monkeypatch) -> Iterator[list[str]]:
    """The third time that work is given to the device, MLX tells of an error."""
    begin, calls = mx.async_eval, []

    def asked(*arrays: Any) -> None:
        calls.append("")
        if len(calls) == 3:
            raise RuntimeError(MESSAGE)
        begin(*arrays)

    monkeypatch.setattr(mx, "async_eval", asked)
    yield calls


def test_mlx_lms_own_functions_raise_the_error(tells_once):
    """The drop-in waits for nothing: mlx-lm reads the tokens."""
    model, tokenizer = demo()
    with patched_mlx_lm(), pytest.raises(RuntimeError, match="Command buffer") as raised:
        mlx_lm.generate(model, tokenizer, "def f(x):", max_tokens=9)
    assert not isinstance(raised.value, DeviceError) and len(tells_once) >= 3
