"""Greedy tokens of 16 chats in one batch are those of mlx-lm for each chat alone, in float32."""

import pytest
from mlx_lm_answers import LIMIT

from mlx_paged import Engine

MOST = {"max_tokens": LIMIT, "temperature": 0.0}
SETTINGS = {
    "chunks of 7, blocks of 8": {"prefill_chunk": 7, "block_size": 8},
    "chunks of 64, blocks of 32": {"prefill_chunk": 64, "block_size": 32},
    "steps of at most 40 ms": {"max_stall_ms": 40.0},
    "drafts": {"speculate": "ngram", "prefill_chunk": 64},
    "a small pool": {"num_blocks": 60},
}


@pytest.fixture(scope="module")
def engine_of(float32):
    def make(**options) -> Engine:
        return Engine(*float32, **{"num_blocks": 400, "max_running": 16} | options)

    return make


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    completions = engine.generate(prompts, **MOST)
    engine.scheduler.allocator.check_integrity()
    return [completion.tokens for completion in completions]


def test_the_answers_are_answers(answers, prompts):
    """Most end by themselves or go on to the limit; all differ."""
    assert len(answers) == len({*map(tuple, answers)}) == len(prompts) == 16
    assert sum(map(len, answers)) > 1000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_mlx_lms(engine_of, prompts, answers, name):
    engine = engine_of(**SETTINGS[name])
    assert tokens_of(engine, prompts) == answers
    metrics = engine.metrics()
    assert (metrics["preemptions"] > 0) == (name == "a small pool")
    assert (metrics["drafts"] > 0) == (name == "drafts")


def test_found_prefixes_change_nothing(engine_of, prompts, answers):
    """Chunks of 512; every prompt is known at least by its full blocks of 16 tokens."""
    engine = engine_of(prefill_chunk=512)
    engine.generate(prompts, max_tokens=1)
    completions = engine.generate(prompts, **MOST)
    assert [completion.tokens for completion in completions] == answers
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.cached_prompt_tokens >= (len(prompt) - 1) // 16 * 16


def test_prefixes_from_a_disk_change_nothing(engine_of, directory, prompts, answers, tmp_path):
    on_disk = {"kv_disk": tmp_path, "model_files": [directory / "float32"]}
    engine = engine_of(**on_disk)
    engine.generate(prompts, max_tokens=1)
    engine.close()
    engine = engine_of(**on_disk)
    engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0  # never wait for a clock
    assert tokens_of(engine, prompts) == answers
    assert engine.metrics()["kv_disk"]["hits"] > 0
    engine.close()
