"""Saved prompt caches are mlx-lm's own files, with the patch and without it."""

import copy
import json
import subprocess
import sys
from functools import cache as once
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as stock

from mlx_paged.drop_in.caches import as_paged, make_prompt_cache, unpaged_prompt_cache
from mlx_paged.drop_in.kv_caches import KVCache
from tests.support.drop_in import saved_cache_script
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    PROMPT,
    as_stock,
    contents,
    filled,
    greedy,
    merged,
    same,
    stock_filled,
    stock_make_prompt_cache,
)
from tests.support.drop_in.saved_cache_script import MODELS
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("patched")


WINDOW = 12
"""Of the tiny gemma3_text."""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "cache.safetensors")


@pytest.fixture(scope="module")
def windowed():
    return tiny_model("gemma3_text")


# In processes of their own


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(patch, step, saver)``: tokens by model in a process that is patched or not."""
    directories = {patch: tmp_path_factory.mktemp(patch) for patch in ("paged", "stock")}

    @once
    def run(patch: str, step: str, saver: str) -> dict[str, list[int]]:
        if step == "continue":
            run(saver, "save", saver)
        done = subprocess.run(
            [sys.executable, "-m", saved_cache_script.__name__, patch, step, directories[saver]],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        tokens: dict[str, list[int]] = json.loads(done.stdout)
        return tokens

    run.directories = directories
    return run


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["paged", "stock"])
@pytest.mark.parametrize("saver", ["paged", "stock"])
def test_what_one_process_saved_another_continues(runs, saver, loader):
    assert runs(saver, "save", saver) == runs("stock", "save", "stock")
    expected = runs("stock", "continue", "stock")
    assert runs(loader, "continue", saver) == expected
    assert len(set(map(tuple, expected.values()))) == len(MODELS)


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", MODELS)
def test_files_name_mlx_lms_classes_and_have_its_arrays(runs, model_type):
    def layout(saver: str):
        runs(saver, "save", saver)
        path = runs.directories[saver] / f"{model_type}.safetensors"
        arrays, metadata = mx.load(str(path), return_metadata=True)
        return metadata, {name: (a.dtype, a.ndim) for name, a in arrays.items()}

    assert layout("paged") == layout("stock")


# In this process


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "jamba"])
def test_a_loaded_cache_is_mlx_lms_own_and_continues(model_type, file):
    model = tiny_model(model_type)
    cache = filled(model)
    stock.save_prompt_cache(file, cache, {"about": "this"})
    loaded, metadata = stock.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"about": "this"}
    assert [type(c) for c in loaded] == [type(c) for c in stock_make_prompt_cache(model)]
    expected = greedy(model, [7, 8], stock_filled(model))
    assert greedy(model, [7, 8], loaded) == greedy(model, [7, 8], cache) == expected


def test_an_empty_cache_can_be_saved(llama, file):
    stock.save_prompt_cache(file, make_prompt_cache(llama))
    loaded = stock.load_prompt_cache(file)
    assert all(c.empty() for c in loaded)
    assert greedy(llama, PROMPT, loaded) == greedy(llama, PROMPT, stock_make_prompt_cache(llama))


@pytest.mark.parametrize("num_trimmed", [1, len(PROMPT)])
def test_a_trimmed_cache_is_saved_as_it_is(llama, file, num_trimmed):
    cache, kept = filled(llama), PROMPT[: len(PROMPT) - num_trimmed]
    stock.trim_prompt_cache(cache, num_trimmed)
    stock.save_prompt_cache(file, cache)
    loaded = stock.load_prompt_cache(file)
    assert {c.offset for c in loaded} == {len(kept)}
    expected = greedy(llama, [*kept, 3], stock_make_prompt_cache(llama))
    assert greedy(llama, [3], loaded) == expected


def test_a_window_layer_is_saved_as_its_last_window(windowed, file):
    cache = filled(windowed)
    stock.save_prompt_cache(file, cache)
    for c, plain in zip(cache, stock.load_prompt_cache(file), strict=True):
        kept = min(c.window or len(PROMPT), len(PROMPT))
        assert (plain.offset, plain.keys.shape[2]) == (len(PROMPT), kept)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW, WINDOW + 1, len(PROMPT)])
@pytest.mark.parametrize("num_more", [1, 5, WINDOW + 3])
def test_windows_of_any_length_go_on(windowed, file, num_tokens, num_more):
    stock.save_prompt_cache(file, filled(windowed, PROMPT[:num_tokens]))
    more = PROMPT[::-1][:num_more]
    expected = greedy(windowed, more, stock_filled(windowed, PROMPT[:num_tokens]), WINDOW + 4)
    assert greedy(windowed, more, stock.load_prompt_cache(file), WINDOW + 4) == expected


def test_a_saved_copy_does_not_change_with_its_source(llama, file):
    cache = filled(llama)
    copies = [as_stock(c) for c in cache]
    stock.trim_prompt_cache(cache, 30)
    llama(mx.array([PROMPT[:30]]), cache=cache)
    mx.eval([c.state for c in cache])
    assert same(contents(copies), contents(stock_filled(llama)))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_batch_is_saved_as_a_batch(model_type, file):
    model = tiny_model(model_type)
    histories = [PROMPT, PROMPT[:5], PROMPT[7:30]]
    batch = merged([filled(model, history) for history in histories])
    stock.save_prompt_cache(file, batch)
    plain = [as_stock(c) for c in batch]  # mlx-lm itself loads no batch with windows
    for caches in (plain, *([stock.load_prompt_cache(file)] if model_type == "llama" else [])):
        logits = model(mx.array([[9]] * 3), cache=caches)
        for row, history in zip(logits, histories, strict=True):
            expected = model(mx.array([[9]]), cache=stock_filled(model, history))[0]
            assert mx.allclose(row, expected, atol=1e-4)


def test_rows_of_equal_length_are_saved_together(llama, file):
    cache = make_prompt_cache(llama, block_size=BLOCK)
    llama(mx.array([PROMPT[:20], PROMPT[20:40]]), cache=cache)
    stock.save_prompt_cache(file, cache)
    assert same(contents(stock.load_prompt_cache(file)), contents(cache))


# Batches


def batched(model, tails, caches, num_tokens: int = WINDOW + 4) -> list[list[int]]:
    generator = BatchGenerator(model, max_tokens=num_tokens)
    tokens: dict[int, list[int]] = {uid: [] for uid in generator.insert(tails, caches=caches)}
    while any(responses := generator.next()):
        for response in responses[1]:
            tokens[response.uid].append(response.token)
    return list(tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1], ids=["loaded first", "new first"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_caches_of_mlx_lm_join_a_batch_of_paged_ones(model_type, file, order):
    """One from a file, one that mlx-lm has rotated, one that is empty, and none."""
    model = tiny_model(model_type)
    stock.save_prompt_cache(file, filled(model))
    rotated = stock_filled(model, PROMPT[:20])
    generated = greedy(model, PROMPT[20:23], rotated, 9)
    histories = [PROMPT, [*PROMPT[:23], *generated], [], []]
    given = [stock.load_prompt_cache(file), rotated, stock_make_prompt_cache(model), None]
    tails = [[7, 8], [4], [9, 1, 30], [2]]
    before = contents(rotated)
    found = batched(model, tails[::order], given[::order])
    for tail, history, tokens in zip(tails, histories, found[::order], strict=True):
        expected = stock_make_prompt_cache(model)
        assert tokens == greedy(model, [*history, *tail], expected, WINDOW + 4)
    assert same(contents(rotated), before)


@pytest.mark.slow
def test_a_batch_of_equal_lengths_may_have_states(file):
    model = tiny_model("jamba")
    stock.save_prompt_cache(file, filled(model))
    found = batched(model, [[7], [8]], [stock.load_prompt_cache(file), filled(model)])
    for tail, tokens in zip(([7], [8]), found, strict=True):
        assert tokens == greedy(model, tail, stock_filled(model), WINDOW + 4)


def test_lists_of_caches_join_too():
    class Lists:
        def make_cache(self):
            return [stock.CacheList(stock.KVCache(), stock.ArraysCache(2)), stock.KVCache()]

    given = unpaged_prompt_cache(Lists())
    kv = [mx.random.normal((1, 2, 5, 16), key=mx.random.key(i)) for i in range(2)]
    given[0][0].update_and_fetch(*kv)
    first, second = as_paged(Lists(), given)
    assert type(first[0]) is type(second) is KVCache and first[1] is given[0][1]
    assert same(contents([first[0]]), kv) and second.empty()
    assert as_paged(Lists(), [first, second]) == [first, second]


def test_models_that_keep_mlx_lms_caches_take_them_as_they_are():
    model = tiny_model("afm7")
    given = stock_filled(model)
    assert as_paged(model, given) == given


def test_tokens_that_windows_forgot_cannot_come_back_by_trimming(windowed):
    paged = as_paged(windowed, [as_stock(c) for c in filled(windowed)], block_size=BLOCK)
    batch = merged([paged, make_prompt_cache(windowed, block_size=BLOCK)])
    elsewhere = merged([make_prompt_cache(windowed, block_size=2), paged])
    taken = [c.extract(0) for c in batch]
    for caches in (paged, batch, elsewhere, taken, copy.deepcopy(paged)):
        assert not stock.can_trim_prompt_cache(caches)
        assert stock.trim_prompt_cache(caches, 3) == 0
    assert stock.can_trim_prompt_cache([c.extract(1) for c in batch])
    whole = as_paged(windowed, [as_stock(c) for c in filled(windowed, PROMPT[: WINDOW - 1])])
    assert stock.can_trim_prompt_cache(whole)


def test_quantized_and_keeping_caches_stay_mlx_lms(llama, file):
    caches = [
        stock.QuantizedKVCache(32, 8),
        stock.RotatingKVCache(8, keep=4),
        stock.ChunkedKVCache(8),
    ]
    for c in caches:
        c.update_and_fetch(*[mx.ones((1, 2, 3, 32))] * 2)
    stock.save_prompt_cache(file, caches)
    assert [type(c) for c in stock.load_prompt_cache(file)] == [type(c) for c in caches]
    assert as_paged(llama, caches) is caches
