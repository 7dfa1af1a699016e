"""Batches of paged caches: every operation is one on block tables, and tokens do not change."""

import copy
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as stock

from mlx_paged.attention.forward import path_counts
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.kv_caches import BatchPagedKVCache, PagedKVCache
from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import SharedPool
from mlx_paged.loading import load_model
from tests.support.drop_in.prompt_cache_cases import (
    blocks_in_use,
    check_integrity,
    merged,
    tokens_written,
)
from tests.support.models.tiny_models import VOCAB, tiny_model

BLOCK = 4
LENGTHS = (5, 40, 17, 33, 1, 2, 29)


def prompts_of(lengths, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


PROMPTS = prompts_of(LENGTHS)


def joining_and_leaving(model, prompts) -> list[list[int]]:
    """Tokens of BatchGenerator when requests of 4 to 15 tokens arrive in three waves."""
    generator = BatchGenerator(
        model, prefill_step_size=16, prefill_batch_size=3, completion_batch_size=4
    )
    waves = {0: prompts[:3], 3: prompts[3:5], 6: prompts[5:]}
    tokens: dict[int, list[int]] = {}
    for step in range(200):
        if step in waves:
            wave = waves[step]
            generator.insert(wave, [12 - 4 * (len(prompt) % 3) for prompt in wave])
        prompting, generated = generator.next()
        for response in generated:
            tokens.setdefault(response.uid, []).append(response.token)
        if step > max(waves) and not prompting and not generated:
            return [tokens[uid] for uid in sorted(tokens)]
    raise AssertionError("the generator does not end")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model_type", "prompts"),
    [
        ("llama", PROMPTS),
        ("qwen3", PROMPTS),
        ("gemma3_text", PROMPTS),
        ("gpt_oss", PROMPTS),
        ("deepseek_v3", PROMPTS),
        # mlx-lm computes the recurrent state of a row over its padding: no ragged prompts
        ("jamba", prompts_of([12] * 7)),
    ],
)
def test_requests_that_join_and_leave_get_the_tokens_of_stock_caches(model_type, prompts):
    model = tiny_model(model_type)
    expected = joining_and_leaving(model, prompts)
    with patched_mlx_lm(block_size=BLOCK):
        path_counts.clear()
        assert joining_and_leaving(model, prompts) == expected
    assert path_counts["paged"] > 0
    assert len(set(map(tuple, expected))) == len(prompts)


class Traffic:
    """What becomes of the pools in a scope: tokens written, blocks copied, objects left."""

    def __init__(self, monkeypatch) -> None:
        self.pools: list[SharedPool] = []
        self._written = tokens_written(monkeypatch)
        init = SharedPool.__init__

        def noting_init(pool, *args, **kwargs):
            init(pool, *args, **kwargs)
            self.pools.append(pool)

        monkeypatch.setattr(SharedPool, "__init__", noting_init)

    @property
    def written(self) -> int:
        return sum(self._written)


def test_admission_and_completion_copy_nothing(llama, monkeypatch):
    traffic = Traffic(monkeypatch)
    with patched_mlx_lm(block_size=BLOCK):
        tokens = joining_and_leaving(llama, PROMPTS)
    (pool,) = traffic.pools
    assert pool.allocator.store.cow_clones == 0
    # a row that ends at step t was computed one step ahead
    computed = sum(map(len, PROMPTS)) + sum(map(len, tokens))
    assert traffic.written == len(llama.layers) * computed
    assert blocks_in_use(pool) == 0
    check_integrity(pool)


@pytest.mark.slow
def test_given_caches_are_extended_by_the_batch_and_stay_as_they_are():
    model, tokenizer = load_model()
    heads = ["def add(a, b):", "class Stack:\n    def"]
    prompts = [tokenizer.encode(head) for head in heads]

    def run(**options) -> tuple[list, list]:
        first = batch_generate(
            model, tokenizer, prompts, max_tokens=12, return_prompt_caches=True, **options
        )
        tails = [[10, 11], [12]]
        again = [
            batch_generate(
                model,
                tokenizer,
                tails,
                prompt_caches=first.caches,
                max_tokens=9,
                return_token_ids=True,
            ).token_ids
            for _ in range(2)
        ]
        return first.caches, [first.texts, *again]

    _, expected = run()
    with patched_mlx_lm(block_size=BLOCK):
        caches, answers = run()
        assert answers == expected
        pool = caches[0][0].layer.pool
        assert pool.allocator.store.cow_clones <= 2 * len(prompts)
        check_integrity(pool)
        del caches
        assert blocks_in_use(pool) == 0


def test_caches_taken_from_a_running_batch_are_forks(llama):
    def run() -> list[int]:
        generator = BatchGenerator(llama, max_tokens=20)
        (uid,) = generator.insert([PROMPTS[2]])
        tokens: list[int] = []
        while len(tokens) < 6:
            tokens += [response.token for response in generator.next()[1]]
        cache, known = generator.extract_cache([uid])[uid]
        known = list(known)
        steps = generate_step(mx.array([9, 8]), llama, prompt_cache=cache, max_tokens=7)
        side = [int(token) for token, _ in steps]
        while generated := generator.next_generated():
            tokens += [response.token for response in generated]
        return [*known, *side, *tokens]

    expected = run()
    with patched_mlx_lm(block_size=BLOCK):
        assert run() == expected


@pytest.mark.parametrize("steps", [(16, 16, 1), (9, 24), (33,), (3,) * 11])
def test_right_padding_is_written_nowhere(llama, steps):
    """Ragged prompts in several forwards, then a decode, against each prompt alone."""
    lengths = [33, 5, 17, 1]
    prompts = prompts_of(lengths, seed=1)
    cache = merged([make_prompt_cache(llama, block_size=BLOCK) for _ in prompts])
    for c in cache:
        c.prepare(lengths=lengths, right_padding=[33 - n for n in lengths])
    padded = np.array([p + [0] * (33 - len(p)) for p in prompts])
    start = 0
    with patched_mlx_lm():
        for step in steps:
            llama(mx.array(padded[:, start : start + step]), cache=cache)
            mx.eval([c.state for c in cache])
            start += step
        for c in cache:
            c.finalize()
        logits = llama(mx.array([[7]] * 4), cache=cache)
    assert cache[0].offset.tolist() == [n + 1 for n in lengths]
    for row, prompt in zip(logits, prompts, strict=True):
        expected = llama(mx.array([[*prompt, 7]]))[0, -1:]
        assert mx.allclose(row, expected, atol=1e-4)


@pytest.mark.parametrize("lengths", [[2, 7], [2, 12], [0, 3]])
def test_padding_may_reach_past_the_blocks_of_the_longest_row(llama, lengths):
    histories, columns = [PROMPTS[1][:23], PROMPTS[2][:1]], max(lengths)
    singles = [make_prompt_cache(llama, block_size=BLOCK) for _ in histories]
    for cache, history in zip(singles, histories, strict=True):
        llama(mx.array([history]), cache=cache)
    batch = merged(singles)
    tails = prompts_of(lengths, seed=3)
    for c in batch:
        c.prepare(lengths=lengths, right_padding=[columns - n for n in lengths])
    with patched_mlx_lm():
        llama(mx.array([tail + [0] * (columns - len(tail)) for tail in tails]), cache=batch)
        for c in batch:
            c.finalize()
        logits = llama(mx.array([[7]] * 2), cache=batch)
    for row, history, tail in zip(logits, histories, tails, strict=True):
        expected = llama(mx.array([[*history, *tail, 7]]))[0, -1:]
        assert mx.allclose(row, expected, atol=1e-4)


def test_a_row_may_leave_between_padded_forwards(llama):
    batch = merged([make_prompt_cache(llama, block_size=BLOCK) for _ in range(2)])[0]
    batch.prepare(lengths=[1, 3], right_padding=[2, 0])
    batch.filter([1])
    batch.update_and_fetch(*[mx.ones((1, 2, 3, 16))] * 2)
    assert batch.offset.tolist() == [3]


def test_layers_may_be_padded_differently(llama):
    batch = merged([make_prompt_cache(llama, block_size=BLOCK) for _ in range(2)])
    batch[0].prepare(lengths=[1, 3], right_padding=[2, 0])
    keys = mx.arange(2 * 2 * 3 * 16, dtype=mx.float32).reshape(2, 2, 3, 16)
    for c in batch:
        c.update_and_fetch(keys, keys)
    assert batch[0].offset.tolist() == [1, 3]
    assert mx.array_equal(mx.array(batch[1].keys_and_values()[0]), keys)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_left_padding_is_written_nowhere(model_type):
    model = tiny_model(model_type)
    prompts = prompts_of([20, 13, 2], seed=2)
    padding = [20 - len(p) for p in prompts]
    cache = merged([make_prompt_cache(model, block_size=BLOCK) for _ in prompts])
    for c in cache:
        c.prepare(left_padding=padding)
    assert cache[0].offset.tolist() == [0, -7, -18]
    tokens = mx.array([[0] * n + p for n, p in zip(padding, prompts, strict=True)])
    with patched_mlx_lm():
        logits = [model(tokens[:, :12], cache=cache), model(tokens[:, 12:], cache=cache)]
        logits = mx.concatenate([*logits, model(mx.array([[3]] * 3), cache=cache)], axis=1)
    assert mx.isfinite(logits).all()
    for row, prompt, n in zip(logits, prompts, padding, strict=True):
        assert mx.allclose(row[n:], model(mx.array([[*prompt, 3]]))[0], atol=1e-4)


def written(cache, plain, count, rng):
    """Append the same random K/V to the caches of all layers and to the plain rows."""
    for layer, c in enumerate(cache):
        keys = rng.standard_normal((len(plain[layer]), 1, count, 2)).astype(np.float32)
        k, _ = c.update_and_fetch(mx.array(keys), mx.array(-keys))
        mx.eval(k)
        plain[layer] = [
            np.concatenate([old, new[0]]) for old, new in zip(plain[layer], keys, strict=True)
        ]


def assert_same(cache, plain) -> None:
    for c, rows in zip(cache, plain, strict=True):
        assert np.array(c.offset).reshape(-1).tolist() == [len(row) for row in rows]
        if not any(map(len, rows)):
            continue
        keys, values = (np.array(mx.array(x)) for x in c.keys_and_values())
        for k, v, row in zip(keys, values, rows, strict=True):
            first = max(0, len(row) - (c.window or len(row)))
            assert np.array_equal(k[0, first : len(row)], row[first:])
            assert np.array_equal(v[0, first : len(row)], -row[first:])
            before = k[0, :first]
            assert np.all((before == row[:first]) | (before == 0))


@pytest.mark.sampled(21)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_operations_is_that_on_plain_rows(seed, window):
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    pool = SharedPool(2, block_size=3, window=window)
    empty = np.zeros((0, 2), np.float32)

    def fresh():
        sequence = pool.new_sequence()
        caches = [PagedKVCache.of(layer_of(pool, i), [sequence], [0], window) for i in range(2)]
        return caches, [[empty]] * 2

    def batch_of(count):
        parts = [fresh() for _ in range(count)]
        for cache, plain in parts:
            plain[:] = map(list, plain)
            if choose.random() < 0.8:
                written(cache, plain, choose.randrange(1, 8), rng)
        plain = [[p[layer][0] for _, p in parts] for layer in range(2)]
        return merged([cache for cache, _ in parts]), plain

    batches = [batch_of(3), batch_of(2)]
    for _ in range(60):
        cache, plain = batches[choose.randrange(len(batches))]
        rows = len(plain[0])
        act = choose.choice(
            ["write", "write", "filter", "extend", "extract", "copy", "trim", "add"]
        )
        if act == "write":
            written(cache, plain, choose.randrange(1, 5), rng)
        elif act == "filter" and rows > 1:
            keep = [choose.randrange(rows) for _ in range(choose.randrange(1, 4))]
            for layer, c in enumerate(cache):
                c.filter(mx.array(keep) if choose.random() < 0.5 else keep)
                plain[layer] = [plain[layer][i] for i in keep]
        elif act == "extend" and rows < 9:
            other, more = batches[choose.randrange(len(batches))]
            for layer, (c, o) in enumerate(zip(cache, other, strict=True)):
                c.extend(o)
                plain[layer] = plain[layer] + more[layer]
        elif act == "extract":
            i = choose.randrange(rows)
            singles = [c.extract(i) for c in cache]
            batches.append((merged([singles, singles]), [[p[i], p[i]] for p in plain]))
        elif act == "copy":
            batches.append((copy.deepcopy(cache), [list(p) for p in plain]))
        elif act == "trim":
            if not cache[0].is_trimmable():
                continue
            asked = choose.randrange(1, 6)
            count = min(asked, *map(len, plain[0]))
            assert [c.trim(asked) for c in cache] == [count] * 2
            plain[:] = [[row[: len(row) - count] for row in p] for p in plain]
        elif act == "add":
            batches.append(batch_of(choose.randrange(1, 4)))
        batches = batches[-6:]
        for each in batches:
            assert_same(*each)
        check_integrity(pool)
    del cache, plain, batches, each
    other = more = c = o = singles = None
    assert blocks_in_use(pool) == 0


def test_a_row_taken_out_keeps_what_the_batch_writes_anew(llama):
    batch = merged([make_prompt_cache(llama, block_size=BLOCK) for _ in range(2)])
    keys = mx.ones((2, 2, 3, 16))
    for c in batch:
        c.update_and_fetch(keys, keys)
    taken = [c.extract(1) for c in batch]
    for c in batch:
        c.trim(3)
        c.update_and_fetch(2 * keys, 2 * keys)
    for c in taken:
        assert mx.array_equal(mx.array(c.keys_and_values()[0]), keys[:1])


def test_a_batch_has_the_protocol_of_stock_batches(llama):
    caches = [make_prompt_cache(llama, block_size=BLOCK) for _ in range(2)]
    for cache, prompt in zip(caches, PROMPTS, strict=False):
        llama(mx.array([prompt]), cache=cache)
    batch = merged(caches)[0]
    assert (batch.size(), batch.empty(), batch.is_trimmable()) == (40, False, True)
    assert batch.nbytes == sum(cache[0].nbytes for cache in caches)
    for paged, plain in ((caches[0][0], stock.KVCache), (batch, stock.BatchKVCache)):
        names = {name for name in vars(plain) if not name.startswith("__")} - {"step"}
        assert names <= set(dir(paged))
    state = batch.state
    batch.trim(3)
    batch.state = state
    assert batch.offset.tolist() == [5, 40]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda b: b.extend(stock.ArraysCache(2)), "a cache is a ArraysCache"),
        (lambda b: b.prepare(left_padding=[1]), "left_padding is given, but"),
        (lambda b: b.prepare(right_padding=[1]), "without lengths"),
        (lambda b: BatchPagedKVCache.merge([b, PagedKVCache.of(b.layer, [], [], 7)]), "window 7"),
        (lambda b: b.update_and_fetch(*[mx.ones((3, 2, 1, 16))] * 2), "3 rows: expected 1"),
    ],
    ids=["extend", "left", "right", "window", "rows"],
)
def test_mistakes_name_the_argument(llama, mistake, message):
    cache = make_prompt_cache(llama)
    llama(mx.array([PROMPTS[0]]), cache=cache)
    with pytest.raises(ValueError, match=message):
        mistake(merged([cache])[0])
