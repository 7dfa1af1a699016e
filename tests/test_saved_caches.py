"""Saved prompt caches are mlx-lm's own files, with the patch and without it."""

import json
import os
import subprocess
import sys
from functools import cache as once
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from prompt_cache_cases import (
    BLOCK,
    PROMPT,
    contents,
    filled,
    greedy,
    merged,
    pool_of,
    same,
    stock_filled,
)
from saved_cache_script import MODELS
from tiny_models import tiny_model

from mlx_paged import OutOfBlocksError
from mlx_paged.batch_prompt_cache import BatchPagedKVCache
from mlx_paged.patch import patched_mlx_lm, stock_load_prompt_cache, stock_save_prompt_cache
from mlx_paged.prompt_cache import PagedKVCache, make_prompt_cache, stock_make_prompt_cache
from mlx_paged.saved_caches import load_prompt_cache, save_prompt_cache

WINDOW = 12
"""Of the tiny gemma3_text."""

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _patched():
    with patched_mlx_lm(block_size=BLOCK):
        yield


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "cache.safetensors")


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


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
            [sys.executable, TESTS / "saved_cache_script.py", patch, step, directories[saver]],
            env=os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
            stdout=subprocess.PIPE,
            check=True,
        )
        tokens: dict[str, list[int]] = json.loads(done.stdout)
        return tokens

    run.directories = directories
    return run


@pytest.mark.parametrize("loader", ["paged", "stock"])
@pytest.mark.parametrize("saver", ["paged", "stock"])
def test_what_one_process_saved_another_continues(runs, saver, loader):
    assert runs(saver, "save", saver) == runs("stock", "save", "stock")
    expected = runs("stock", "continue", "stock")
    assert runs(loader, "continue", saver) == expected
    assert len(set(map(tuple, expected.values()))) == len(MODELS)


@pytest.mark.parametrize("model_type", MODELS)
def test_files_name_mlx_lms_classes_and_have_its_arrays(runs, model_type):
    def layout(saver: str):
        runs(saver, "save", saver)
        path = runs.directories[saver] / f"{model_type}.safetensors"
        arrays, metadata = mx.load(str(path), return_metadata=True)
        return metadata, {name: (a.dtype, a.ndim) for name, a in arrays.items()}

    assert layout("paged") == layout("stock")


# In this process


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_loaded_cache_is_paged_and_its_layers_share_a_sequence(model_type, file):
    model = tiny_model(model_type)
    stock_save_prompt_cache(file, stock_filled(model))
    loaded = stock.load_prompt_cache(file)
    assert {type(c) for c in loaded} == {PagedKVCache}
    assert len({c.rows for c in loaded}) == 1 and pool_of(loaded).is_loaded
    assert pool_of(loaded).block_size == BLOCK
    expected = greedy(model, [7, 8], stock_filled(model))
    assert greedy(model, [7, 8], loaded) == expected
    pool_of(loaded).check_integrity()


def test_caches_that_another_name_of_mlx_lms_function_gets_are_refused(llama, file):
    """It would name classes in the file that mlx-lm does not have."""
    with pytest.raises(ValueError, match="not serializable: ContentKey"):
        stock_save_prompt_cache(file, filled(llama))


@pytest.mark.parametrize("trimmed", [0, 1, len(PROMPT)])
def test_a_trimmed_cache_is_saved_as_it_is(llama, file, trimmed):
    cache = filled(llama)
    stock.trim_prompt_cache(cache, trimmed)
    save_prompt_cache(file, cache)
    for loaded in (load_prompt_cache(file), stock_load_prompt_cache(file)):
        assert [c.offset for c in loaded] == [len(PROMPT) - trimmed] * len(loaded)
        expected = stock_make_prompt_cache(llama)
        assert greedy(llama, [*PROMPT[len(PROMPT) - trimmed :], 3], loaded) == greedy(
            llama, [*PROMPT, 3], expected
        )


def test_a_window_layer_is_saved_as_its_last_window(windowed, file):
    cache = filled(windowed)
    save_prompt_cache(file, cache)
    for c, plain in zip(cache, stock_load_prompt_cache(file), strict=True):
        kept = min(c.window or len(PROMPT), len(PROMPT))
        assert (plain.offset, plain.keys.shape[2]) == (len(PROMPT), kept)
    assert [c.window for c in load_prompt_cache(file)] == [c.window for c in cache]


@pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW, WINDOW + 1, len(PROMPT)])
@pytest.mark.parametrize("steps", [1, 5, WINDOW + 3], ids=["token", "chunk", "chunks"])
@pytest.mark.parametrize("loader", [load_prompt_cache, stock_load_prompt_cache])
def test_windows_of_any_length_go_on(windowed, file, num_tokens, steps, loader):
    save_prompt_cache(file, filled(windowed, PROMPT[:num_tokens]))
    more = PROMPT[::-1][:steps]
    expected = greedy(windowed, more, stock_filled(windowed, PROMPT[:num_tokens]), WINDOW + 4)
    assert greedy(windowed, more, loader(file), WINDOW + 4) == expected


def test_a_rotated_cache_of_mlx_lm_is_loaded_in_order(windowed, file):
    plain = stock_filled(windowed, PROMPT[:20])
    tokens = greedy(windowed, PROMPT[20:23], plain, 9)
    stock_save_prompt_cache(file, plain)
    loaded = load_prompt_cache(file)
    assert greedy(windowed, [tokens[-1], 4], loaded, 20) == greedy(
        windowed, [tokens[-1], 4], plain, 20
    )


def test_tokens_that_windows_forgot_cannot_come_back_by_trimming(windowed, file):
    save_prompt_cache(file, filled(windowed))
    loaded = load_prompt_cache(file)
    batch = merged([loaded, make_prompt_cache(windowed, block_size=BLOCK)])
    for caches in (loaded, batch, [c.extract(0) for c in batch]):
        assert not stock.can_trim_prompt_cache(caches)
        assert stock.trim_prompt_cache(caches, 3) == 0
    assert stock.can_trim_prompt_cache([c.extract(1) for c in batch])
    save_prompt_cache(file, filled(windowed, PROMPT[:WINDOW]))
    assert stock.can_trim_prompt_cache(load_prompt_cache(file))


@pytest.mark.parametrize(
    ("model_type", "loader"),
    [
        ("llama", load_prompt_cache),
        ("llama", stock_load_prompt_cache),
        ("gemma3_text", load_prompt_cache),  # mlx-lm itself loads no batch with windows
    ],
)
def test_a_batch_is_saved_as_a_batch(model_type, loader, file):
    model = tiny_model(model_type)
    histories = [PROMPT, PROMPT[:5], PROMPT[7:30]]
    save_prompt_cache(file, merged([filled(model, history) for history in histories]))
    batch = loader(file)
    assert (type(batch[0]) is BatchPagedKVCache) == (loader is load_prompt_cache)
    if loader is load_prompt_cache:
        assert len({c.rows for c in batch}) == 1
    logits = model(mx.array([[9]] * 3), cache=batch)
    for row, history in zip(logits, histories, strict=True):
        expected = model(mx.array([[9]]), cache=stock_filled(model, history))[0]
        assert mx.allclose(row, expected, atol=1e-4)


def test_rows_of_equal_length_are_saved_together(llama, file):
    tokens = mx.array([PROMPT[:20], PROMPT[20:40]])
    cache = make_prompt_cache(llama, block_size=BLOCK)
    llama(tokens, cache=cache)
    save_prompt_cache(file, cache)
    loaded = load_prompt_cache(file)
    assert same(contents(loaded), contents(cache))
    assert same(contents(stock_load_prompt_cache(file)), contents(cache))


def test_loaded_caches_join_a_batch_of_new_ones(llama, file):
    save_prompt_cache(file, filled(llama))
    fresh = filled(llama, PROMPT[:7])
    for caches in ([load_prompt_cache(file), fresh], [fresh, load_prompt_cache(file)]):
        batch = merged(caches)
        assert pool_of(batch) is pool_of(fresh)
        logits = llama(mx.array([[9]] * 2), cache=batch)
        lengths = [c[0].offset for c in caches]
        for row, length in zip(logits, lengths, strict=True):
            expected = llama(mx.array([[9]]), cache=stock_filled(llama, PROMPT[:length]))[0]
            assert mx.allclose(row, expected, atol=1e-4)


def test_a_loaded_cache_may_be_too_large(llama, file):
    save_prompt_cache(file, filled(llama))
    with pytest.raises(OutOfBlocksError):
        load_prompt_cache(file, kv_memory=1000)


def test_quantized_and_keeping_caches_stay_mlx_lms(llama, file):
    caches = [
        stock.QuantizedKVCache(32, 8),
        stock.RotatingKVCache(8, keep=4),
        stock.ChunkedKVCache(8),
    ]
    for c in caches:
        c.update_and_fetch(*[mx.ones((1, 2, 3, 32))] * 2)
    save_prompt_cache(file, caches)
    assert [type(c) for c in load_prompt_cache(file)] == [type(c) for c in caches]
