"""Paged caches are mlx-lm's cache classes: what scripts do with these gives the same arrays."""

import copy
import pickle
import subprocess
import sys
import threading
from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_attention_mask

from mlx_paged.drop_in import kv_caches
from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.caches import construction, make_prompt_cache
from mlx_paged.drop_in.patch import unpatch_mlx_lm
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    blocks_in_use,
    pool_of,
    stock_make_prompt_cache,
)
from tests.support.models.architectures import build
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("patched")


WINDOW = 12
ARGUMENTS = {
    "KVCache": (),
    "RotatingKVCache": (WINDOW,),
    "BatchKVCache": ([0, 3],),
    "BatchRotatingKVCache": (WINDOW, [0, 3]),
}
MAKE = {name: partial(getattr(kv_caches, name), *args) for name, args in ARGUMENTS.items()}
MAKE["KVCache"] = lambda: stock.KVCache()
SHAPES = {"heads": (2, 16, 16), "one head": (1, 16, 16), "latent": (1, 24, 8)}


def make_stock(name: str):
    construction.is_stock = True
    try:
        return getattr(stock, name)(*ARGUMENTS[name])
    finally:
        construction.is_stock = False


def kv(tokens: int, seed: int = 0, rows: int = 1, shape: str = "heads", dtype=mx.float32):
    heads, k_dim, v_dim = SHAPES[shape]
    return [
        mx.random.normal((rows, heads, tokens, dim), key=mx.random.key(seed + i)).astype(dtype)
        for i, dim in enumerate((k_dim, v_dim))
    ]


def pair(name: str, steps=(5, 6, 1, 1), **options):
    """A paged and a stock cache with the same history."""
    caches = MAKE[name](), make_stock(name)
    assert isinstance(caches[0], PagedCache) and not isinstance(caches[1], PagedCache)
    rows = 2 if "Batch" in name else 1
    for i, tokens in enumerate(steps):
        for cache in caches:
            mx.eval(cache.update_and_fetch(*kv(tokens, 10 * i, rows, **options)))
    return caches


def shown(cache) -> list:
    """What scripts read of a cache: its tokens in temporal order, without padding, and counts."""
    if cache.keys is None:
        return [None, None, cache.size()]
    arrays, padding = [], None
    for x in (cache.keys, cache.values):
        if isinstance(cache, stock.BatchRotatingKVCache) and cache.rotated:
            x = mx.roll(x, -cache._idx, axis=2)
        elif isinstance(cache, stock.RotatingKVCache):
            x = cache._temporal_order(x)
        elif hasattr(cache, "_idx"):
            x = x[..., : cache._idx, :]
        else:
            x = x[..., : cache.offset, :]
        skipped = x.shape[2] - cache.size()
        x = x[..., skipped:, :]
        if hasattr(cache, "left_padding"):
            padding = (cache.left_padding - skipped).tolist()
            columns = mx.arange(x.shape[2]) >= mx.array(padding)[:, None]
            x = mx.where(columns[:, None, :, None], x, 0)
        arrays.append(x)
    return [*arrays, mx.array(cache.offset).tolist(), cache.size(), cache.empty(), padding]


def assert_equal(paged, plain) -> None:
    for a, b in zip(shown(paged), shown(plain), strict=True):
        if isinstance(a, mx.array) and isinstance(b, mx.array):
            assert a.dtype == b.dtype and mx.array_equal(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("name", MAKE)
def test_classes_are_mlx_lms(name):
    cache, plain = MAKE[name](), make_stock(name)
    kind = type(plain)
    assert isinstance(cache, kind) and type(cache).__name__ == kind.__name__
    assert vars(plain).keys() <= set(dir(cache)) | {"_lengths", "_right_padding"}
    with pytest.raises(AttributeError):
        _ = cache.bits
    assert_equal(cache, plain)
    unpatch_mlx_lm()
    assert isinstance(MAKE[name](), PagedCache)  # the fixture's scope still holds


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "KVCache"])
def test_rotating_caches_and_batches_that_a_script_makes_stay_mlx_lms(name):
    assert type(getattr(stock, name)(*ARGUMENTS[name])) is getattr(stock, name)


def test_masks_have_the_shape_of_mlx_lms():
    cache, plain = pair("KVCache")
    for columns, window in ((1, 4), (3, None), (3, 4)):
        mask, expected = (
            create_attention_mask(mx.zeros((1, columns)), c, window, return_array=True)
            for c in (cache, plain)
        )
        assert mx.array_equal(mask, expected)


def test_integers_stay_in_mlx_lms_cache():
    cache, numbers = stock.KVCache(), mx.arange(3).reshape(1, 1, 3, 1)
    cache.update_and_fetch(numbers, numbers)
    assert cache.keys_and_values()[0].tolist() == numbers.tolist()


def test_values_without_columns_stay_in_mlx_lms_cache():
    """minimax_m3_vl keeps its index keys so, in batches too."""
    keys = mx.random.normal((1, 1, 3, 4))
    for cache in (stock.KVCache(), stock.KVCache().merge([stock.KVCache()])):
        found, values = cache.update_and_fetch(keys, mx.zeros((1, 1, 3, 0)))
        assert mx.array_equal(found, keys) and values.shape == (1, 1, 3, 0)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [(5,), (1,), (5, 6, 1, 1), (40, 1), (3, 1, 30), (WINDOW,)])
@pytest.mark.parametrize("name", MAKE)
def test_attributes_read_as_mlx_lms(name, steps, shape, dtype):
    paged, plain = pair(name, steps, shape=shape, dtype=dtype)
    assert_equal(paged, plain)
    assert paged.keys is paged.keys
    own, theirs = paged.state, plain.state
    assert len(own) == len(theirs) and own[0].shape[:2] == theirs[0].shape[:2]
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own)), own):
        assert_equal(type(plain).from_state(twin), plain)
    assert_equal(type(paged).from_state(plain.state), plain)


def trimmed(cache):
    cache.trim(3)


def trimmed_to_nothing(cache):
    cache.trim(100)


def keys_then_offset(cache):
    k, v = kv(9, 3)
    cache.keys, cache.values = k, v
    cache.offset = k.shape[2]


def offset_then_keys(cache):
    cache.offset = 4
    cache.keys, cache.values = kv(4, 3)


def rewound(cache):
    cache.offset -= 2


def cleared(cache):
    cache.keys = cache.values = None
    cache.offset = 0


def scaled(cache):
    cache.keys = cache.keys * 2


def state_of_another(cache):
    other = stock.KVCache()
    other.update_and_fetch(*kv(7, 5))
    cache.state = other.state


def quantized(cache):
    other = cache.to_quantized(group_size=32, bits=8)
    assert type(other) is stock.QuantizedKVCache


OPERATIONS = (
    trimmed,
    trimmed_to_nothing,
    keys_then_offset,
    offset_then_keys,
    rewound,
    cleared,
    scaled,
    state_of_another,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_fresh", [False, True], ids=["used", "fresh"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_are_those_of_mlx_lm(operation, is_fresh):
    if is_fresh and operation in (rewound, scaled, trimmed, trimmed_to_nothing):
        return
    paged, plain = pair("KVCache", () if is_fresh else (5, 6, 1))
    other, _ = pair("KVCache")
    twin = copy.deepcopy(paged)
    before = shown(twin)
    for cache in (paged, plain):
        operation(cache)
    assert_equal(paged, plain)
    for cache in (paged, plain):
        for tokens in (3, 1):
            mx.eval(cache.update_and_fetch(*kv(tokens, 77)))
    assert_equal(paged, plain)
    for x, y in zip(shown(twin), before, strict=True):
        assert mx.array_equal(x, y) if isinstance(x, mx.array) else x == y
    assert isinstance(paged, stock.KVCache) and other.offset == 13


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "state", "keys", "slice", "repeat"])
def test_a_copy_never_shows_later_writes(name, way):
    paged, plain = pair(name, (4, 5))
    kept = {
        "copy": lambda: copy.copy(paged),
        "deepcopy": lambda: copy.deepcopy(paged),
        "pickle": lambda: pickle.loads(pickle.dumps(paged)),
        "state": lambda: type(plain).from_state(paged.state),
        "keys": lambda: (paged.keys, paged.values),
        "slice": lambda: (paged.keys[..., 1:4, :], paged.values[..., 1:4, :]),
        "repeat": lambda: [mx.repeat(x, 2, axis=0) for x in (paged.keys, paged.values)],
    }[way]()
    pool, rows = paged.layer.pool, 2 if "Batch" in name else 1
    for cache in (paged,):
        cache.trim(6)
        mx.eval(cache.update_and_fetch(*kv(6, 50, rows)))
    del cache
    paged = None
    other = MAKE[name]()  # takes the blocks that are free now
    mx.eval(other.update_and_fetch(*kv(30, 60, rows)))
    if way in ("copy", "deepcopy", "pickle", "state"):
        assert_equal(kept, plain)
    else:
        expected = shown(plain)[:2]
        columns = slice(1, 4) if way == "slice" else slice(0, 9)
        for x, y in zip(kept, expected, strict=True):
            y = mx.repeat(y, 2, axis=0) if way == "repeat" else y
            assert mx.array_equal(x, y[..., columns, :])
    del kept, other
    assert blocks_in_use(pool) == 0


def test_one_gather_serves_two_reads_and_the_next_write_ends_it():
    paged, _ = pair("KVCache")
    keys = paged.keys
    assert paged.keys is keys
    paged.update_and_fetch(*kv(1))
    assert paged.keys is not keys and paged.keys.shape[2] == keys.shape[2] + 1


def test_evaluated_arrays_may_be_read_by_another_thread():
    paged, plain = pair("KVCache")
    states = [paged.state]
    mx.eval(states)
    found = []
    thread = threading.Thread(target=lambda: found.append(states[0][0].tolist()))
    thread.start()
    thread.join()
    assert found == [plain.keys[..., : plain.offset, :].tolist()]
    assert blocks_in_use(paged.layer.pool) == -(-paged.offset // BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_a_pickle_needs_only_mlx_lm(name, tmp_path):
    paged, plain = pair(name)
    file = tmp_path / "cache.pickle"
    file.write_bytes(pickle.dumps((paged, plain)))
    code = (
        "import pickle, sys\n"
        "import mlx.core as mx\n"
        "a, b = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert type(a) is type(b) and vars(a).keys() == vars(b).keys()\n"
        "assert not any(name.startswith('mlx_paged') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def test_mlx_lms_own_caches_stay_its_own_under_the_patch():
    keeping, subclass = stock.RotatingKVCache(8, keep=4), type("Mine", (stock.KVCache,), {})()
    assert type(keeping) is stock.RotatingKVCache and keeping.keep == 4
    assert vars(subclass) == {"keys": None, "values": None, "offset": 0}
    plain = make_stock("KVCache")
    plain.update_and_fetch(*kv(5))
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert type(twin) is stock.KVCache and mx.array_equal(twin.keys, plain.keys)
    assert type(type(plain).from_state(plain.state)) is stock.KVCache
    mine = stock.RotatingKVCache(8)
    assert type(type(mine)(8, keep=2)) is stock.RotatingKVCache
    assert {type(c) for c in stock_make_prompt_cache(tiny_model("llama"))} == {stock.KVCache}


def test_threads_may_write_caches_that_another_one_made():
    caches, found = [stock.KVCache() for _ in range(4)], []

    def write(mine) -> None:
        for cache in mine:
            mx.eval(cache.update_and_fetch(*kv(5)))
        mx.eval(mine[0].merge(mine).update_and_fetch(*kv(1, rows=2)))
        found.append(mine[0].layer.pool)

    threads = [threading.Thread(target=write, args=(caches[i : i + 2],)) for i in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len({id(pool) for pool in found}) == 2


def test_caches_made_without_a_model_share_one_pool():
    caches = [stock.KVCache() for _ in range(3)]
    for i, cache in enumerate(caches):
        cache.update_and_fetch(*kv(4 + i, i))
    pool = pool_of(caches)
    assert {c.layer.pool for c in caches} == {pool}
    held = blocks_in_use(pool)
    batch = caches[0].merge(caches)
    batch.update_and_fetch(*kv(1, rows=3))
    assert batch.offset.tolist() == [5, 6, 7] and batch.layer.pool is pool
    assert blocks_in_use(pool) - held == 3  # one for each row
    other = stock.KVCache()
    other.update_and_fetch(*kv(4, shape="one head"))
    assert other.layer.pool is not pool


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "deepseek_v32"])
def test_a_model_gives_the_same_with_caches_of_its_own_making(model_type):
    model = build(model_type)
    made = model.make_cache() if hasattr(model, "make_cache") else None
    caches = made or [stock.KVCache() for _ in model.layers]
    expected = stock_make_prompt_cache(model)
    for tokens in ([[3, 1, 4, 1, 5] * 5], [[9]], [[2, 6]], [[5]]):
        found, wanted = (model(mx.array(tokens), cache=c) for c in (caches, expected))
        assert mx.allclose(found, wanted, atol=1e-4)


def test_pipelines_and_indexers_stay_paged():
    model = build("deepseek_v32")
    cache = make_prompt_cache(model, block_size=BLOCK)
    for tokens in ([[3, 1, 4, 1, 5]], [[9]]):
        mx.eval(model(mx.array(tokens), cache=cache))
    assert all(isinstance(c, PagedCache) for layer in cache for c in layer.caches)


def test_a_checkpointed_layer_does_what_it_does_with_stock_caches():
    layer, found = tiny_model("llama").model.layers[0], []
    x = mx.random.normal((1, 7, 64), key=mx.random.key(1))
    for cache in (stock.KVCache(), make_stock("KVCache")):
        layer(x[:, :5], "causal", cache)

        def loss(x, cache=cache):
            mask = create_attention_mask(x, cache)
            run = mx.checkpoint(lambda x: layer(x, mask, cache))
            return run(x).square().sum()

        found.append([*mx.value_and_grad(loss)(x), cache.offset])
    for paged, plain in zip(*found, strict=True):
        assert mx.allclose(mx.array(paged), mx.array(plain), rtol=1e-4, atol=1e-3)
