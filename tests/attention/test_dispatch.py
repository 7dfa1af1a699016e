"""Both paths of attention give mlx-lm's answer; the device and the environment decide."""

import platform
import warnings
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_paged import Engine, ops
from mlx_paged.attention import forward
from mlx_paged.attention.causal import FULL, causal
from mlx_paged.attention.forward import (
    Chunk,
    Forward,
    LayerView,
    causal_mask,
    even_length,
    path_counts,
)
from mlx_paged.attention.paths import (
    ANY_NUMBER,
    FEW_QUERIES,
    LONG_CHUNK,
    LONG_CHUNK_OF_UNITS,
    PATHS,
    has_matrix_units,
    max_paged_queries,
    max_paged_queries_of,
)
from mlx_paged.attention.sdpa_hook import Query, mlx_attention
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model
from tests.support.ops.attention_paths import attending_by
from tests.support.ops.paged_cases import TOLERANCE, random_case, worst_error

BLOCK = 4
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (40, 5, 33)]


def pool_of(case) -> KVPool:
    """The case's K/V as a pool; where a table means nothing it names block 0, as in an engine."""
    heads, num_blocks, block_size, head_dim = case.k_cache.shape
    shape = KVShape(heads, head_dim, case.v_cache.shape[3], case.k_cache.dtype)
    pool = KVPool([shape], num_blocks, block_size)
    pool.k[0], pool.v[0] = case.k_cache, case.v_cache
    tables = np.array(case.block_tables)
    case.block_tables = mx.array(np.where((tables >= 0) & (tables < num_blocks), tables, 0))
    return pool


def query_of(case) -> Query:
    return Query(case.q, case.scale, causal(case.options.get("window")), case.options.get("sinks"))


def attended(case, limit: int, chunks=()) -> mx.array | None:
    """The case's queries as rows that attend as they are, or as chunks if longer than `limit`."""
    view = LayerView(pool_of(case), 0, max_paged_queries=limit)
    tables, lens = case.block_tables, case.context_lens
    length, max_context = case.q.shape[2], int(lens.max())
    positions = lens[:, None] - length + mx.arange(length)
    offsets = lens - length, lens
    view.forward = Forward(
        length, positions, None, tables, lens, max_context, *offsets, row_chunks=chunks
    )
    return view.attend(query_of(case))


def assert_like_float64(out, case) -> None:
    expected, _ = case.expected()
    assert worst_error(out, expected) <= TOLERANCE[out.dtype]


@pytest.mark.parametrize(
    "options", [(), ("window_21",), ("sinks",), ("window_21", "sinks")], ids=str
)
@pytest.mark.parametrize("length", [2, 9, 37])
@pytest.mark.parametrize("path", PATHS)
def test_both_paths_attend_a_chunk_as_float64_does(path, length, options):
    case = random_case([37], num_tokens=length, block_size=BLOCK, options=options)
    with attending_by(path):
        blocks = case.block_tables[0, : -(-37 // BLOCK)]
        chunk = Chunk(0, 37 - length, length, blocks)
        out = attended(case, max_paged_queries(), [chunk])
    assert path_counts == {path: 1}
    assert_like_float64(out, case)


@pytest.mark.parametrize(
    "options", [(), ("window_21",), ("sinks",), ("window_21", "sinks")], ids=str
)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("path", PATHS)
def test_both_paths_attend_ragged_rows_as_float64_does(path, length, options):
    case = random_case([3, 29, 16], num_tokens=length, block_size=BLOCK, options=options)
    with attending_by(path):
        out = attended(case, max_paged_queries())
    assert path_counts == {path: 1}
    assert_like_float64(out, case)


@pytest.mark.parametrize(
    ("path", "columns", "num_calls"),
    [("paged", 2, 1), ("paged", 9, 1), ("gather", 2, 1), ("gather", 9, 3)],
)
def test_rows_of_a_padded_forward_are_gathered_one_by_one_if_long(path, columns, num_calls):
    contexts = np.array([12, 29, 16], np.int32)
    case = random_case(contexts.tolist(), num_tokens=columns, block_size=BLOCK)
    pool = pool_of(case)
    spans = PaddedSpans.of((contexts - columns).tolist(), columns)
    with attending_by(path):
        step = PaddedBatch((0, 1, 2), spans, np.array(case.block_tables), BLOCK, range(3))
        view = LayerView(pool, 0, FULL, step.max_paged_queries, step)
        out = view.attend(query_of(case))
    assert path_counts == {path: num_calls}
    assert_like_float64(out, case)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_an_engine_gives_mlx_lms_tokens_on_a_forced_path(model_type, path):
    model = tiny_model(model_type)
    expected = [solo_greedy(model, prompt, 12) for prompt in PROMPTS]
    with attending_by(path):
        engine = Engine(model, block_size=BLOCK, num_blocks=100, prefill_chunk=16)
        done = engine.generate(PROMPTS, max_tokens=12)
    assert [completion.tokens for completion in done] == expected
    assert set(path_counts) == {path}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_drop_in_caches_give_mlx_lms_tokens_on_a_forced_path(model_type, path):
    model, [prompt, *_] = tiny_model(model_type), PROMPTS
    expected = solo_greedy(model, prompt, 12)
    with patched_mlx_lm(block_size=BLOCK), attending_by(path):
        cache = make_prompt_cache(model, block_size=BLOCK)
        steps = generate_step(
            mx.array(prompt), model, max_tokens=12, prompt_cache=cache, prefill_step_size=13
        )
        assert [int(token) for token, _ in steps] == expected
    assert set(path_counts) == {path}


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


def test_on_a_cpu_the_paged_op_always_answers():
    with attending_by(""):
        assert max_paged_queries() == ANY_NUMBER


def test_on_a_gpu_few_queries_take_the_paged_op(on_a_gpu):
    with attending_by(""):
        assert max_paged_queries() == FEW_QUERIES == 8


@pytest.mark.parametrize(("path", "expected"), [("paged", ANY_NUMBER), ("gather", 0)])
def test_the_environment_overrides_the_device(path, expected, on_a_gpu):
    with attending_by(path):
        assert max_paged_queries() == expected


@pytest.fixture
def gpu(monkeypatch):
    """Says which one MLX finds."""

    def set_architecture(name: str, macos: str = "26.2") -> None:
        has_matrix_units.cache_clear()
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": name})
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))

    yield set_architecture
    has_matrix_units.cache_clear()


@pytest.mark.parametrize(
    ("name", "has_units"),
    [
        *[("applegpu_g16s", False), ("applegpu_g17g", True), ("applegpu_g18p", True)],
        *[("applegpu_g17p", False), ("x86_64", False), ("sm_90", False)],
    ],
)
def test_which_gpus_have_matrix_units(name, has_units, gpu):
    """Those that MLX uses: the GPU of an M5 is a g17, and `p` stands for phones."""
    gpu(name)
    assert has_matrix_units() == has_units


@pytest.mark.parametrize(
    ("macos", "uses_units"),
    [
        ("26.2", True),
        ("26.3.1", True),
        ("27.0", True),
        ("26", False),
        ("26.1", False),
        ("15.6", False),
    ],
)
def test_mlx_uses_matrix_units_from_a_version_of_macos_on(macos, uses_units, gpu):
    gpu("applegpu_g17g", macos)
    assert has_matrix_units() == uses_units


FEW_KV = KVShape(2, 64, 64, mx.float16)
"""What the kernel for chunks takes, and MLX's own, too."""


@pytest.mark.parametrize(
    ("shape", "is_served", "most"),
    [
        (FEW_KV, True, LONG_CHUNK - 1),
        (FEW_KV, False, FEW_QUERIES),
        (replace(FEW_KV, head_dim=128, v_head_dim=128), True, LONG_CHUNK - 1),
        (replace(FEW_KV, head_dim=192), True, ANY_NUMBER),
        (replace(FEW_KV, v_head_dim=256), True, ANY_NUMBER),
    ],
)
def test_on_a_gpu_the_kernel_for_chunks_takes_those_that_mlx_has_no_better_one_for(
    shape, is_served, most, gpu, monkeypatch
):
    """The matrix units of an M5 make MLX's own better for all heads."""
    monkeypatch.setattr(ops, "serves_chunks", lambda *_: is_served)
    gpu("applegpu_g16s")
    assert max_paged_queries_of(shape, FEW_QUERIES) == most
    gpu("applegpu_g17s")
    most = LONG_CHUNK_OF_UNITS - 1 if is_served else most
    assert max_paged_queries_of(shape, FEW_QUERIES) == most
    for forced in (0, ANY_NUMBER):
        assert max_paged_queries_of(shape, forced) == forced


def ragged_views(limit: int, window: int | None = None):
    """A layer, its queries and, in float64, the answer: two decodes and chunks of 3 and of 9."""
    lengths, contexts = [1, 1, 3, 9], [20, 5, 16, 37]
    case = random_case(contexts, num_tokens=9, block_size=BLOCK)
    case.options |= {"window": window} if window else {}
    begins = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    chunks = [
        Chunk(begins[i], contexts[i] - lengths[i], lengths[i], case.block_tables[i]) for i in (2, 3)
    ]
    view = LayerView(pool_of(case), 0, max_paged_queries=limit)
    for chunk, table in zip(chunks, np.array(case.block_tables)[2:], strict=True):
        object.__setattr__(chunk, "block_ids", mx.array(table[: -(-chunk.stop // BLOCK)]))
    rows = [case.q[i, :, 9 - n :].transpose(1, 0, 2) for i, n in enumerate(lengths)]
    q = mx.concatenate(rows)[:, :, None]
    lens = case.context_lens
    view.forward = Forward(
        1,
        lens,
        None,
        case.block_tables,
        lens,
        37,
        lens,
        lens,
        cu_seqlens=mx.array(begins),
        chunks=chunks,
    )
    expected, _ = case.expected()
    wanted = [expected[i, :, 9 - n :].transpose(1, 0, 2) for i, n in enumerate(lengths)]
    return view, Query(q, case.scale, causal(window), None), np.concatenate(wanted)[:, :, None]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (ANY_NUMBER, {"paged": 1}),
        (FEW_QUERIES, {"paged": 1, "gather": 1}),
        (2, {"paged": 1, "gather": 2}),
        (0, {"gather": 3}),
    ],
)
def test_short_sequences_share_one_op_and_long_ones_are_gathered(limit, counts, window):
    view, query, expected = ragged_views(limit, window)
    path_counts.clear()
    out = view.attend(query)
    assert path_counts == counts
    assert worst_error(out, expected) <= TOLERANCE[out.dtype]


@pytest.mark.parametrize("options", [(), ("window_21",), ("sinks",)], ids=str)
def test_some_queries_at_a_time_attend_where_mlx_has_scores_in_memory(options, monkeypatch):
    case = random_case([90], num_tokens=70, head_dim=48, block_size=BLOCK, options=options)
    sizes = []

    def attend(q, k, v, **given):
        sizes.append((q.shape[2], k.shape[2]))
        return mlx_attention(q, k, v, **given)

    monkeypatch.setattr(forward, "mlx_attention", attend)
    monkeypatch.setattr(forward, "SCORES", 4 * 33 * 90)
    chunk = Chunk(0, 20, 70, case.block_tables[0, : -(-90 // BLOCK)])
    assert_like_float64(attended(case, 0, [chunk]), case)
    assert sizes == [(33, 53), (33, 86), (4, 90)]


@pytest.mark.parametrize("window", [None, 6])
def test_layers_share_what_a_chunk_is_gathered_by(window):
    view, query, _ = ragged_views(0, window)
    view.attend(query)
    *_, chunk = view.forward.chunks
    first = chunk.keys(causal(window), 2, BLOCK)
    view.attend(query)
    assert chunk.keys(causal(window), 2, BLOCK) is first
    assert chunk.keys(causal(window), 4, BLOCK).wanted[2].shape[1] == 4
    assert chunk.keys(causal(chunk.stop), 2, BLOCK) is chunk.keys(FULL, 2, BLOCK)


@pytest.mark.parametrize("window", [None, 40])
def test_the_number_of_gathered_blocks_is_even_and_the_added_ones_are_the_last_again(window):
    chunk = Chunk(0, 100, 44, mx.arange(7, 43))  # 36 blocks of 4 tokens
    table, num_keys, runs = chunk.keys(causal(window), 2, BLOCK).wanted
    first = 0 if window is None else 61 // BLOCK
    blocks = [*range(7 + first, 43)]
    added = [42] * (even_length(36 - first) - len(blocks))
    assert added and table.tolist() == [blocks + added]
    assert runs[0, 0].tolist() == [2 * block for block in blocks + added]
    assert num_keys == 144 - BLOCK * first


def test_even_lengths_are_few_and_at_most_a_quarter_more():
    lengths = [even_length(count) for count in range(1, 4097)]
    assert all(count <= each <= 1.25 * count for count, each in enumerate(lengths, start=1))
    assert len(set(lengths)) == 8 + 4 * 9


def test_an_engine_gathers_long_chunks_on_a_gpu(monkeypatch):
    monkeypatch.setattr("mlx_paged.runner.layer_cache.max_paged_queries", lambda: FEW_QUERIES)
    model, [prompt, *_] = tiny_model("llama"), PROMPTS
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=64)
    path_counts.clear()
    [done] = engine.generate([prompt], max_tokens=12)
    n_layers = len(engine.manager.pool.k)
    # the last layer computes only the last token of the prompt, a row like a decode
    assert path_counts == {"gather": n_layers - 1, "paged": n_layers * 11 + 1}
    assert done.tokens == solo_greedy(model, prompt, 12)


def test_an_unknown_path_costs_one_warning_and_nothing_else():
    model = tiny_model("llama")
    with warnings.catch_warnings(record=True) as caught, attending_by("fast"):
        warnings.simplefilter("always")
        for _ in range(2):
            [done] = Engine(model, num_blocks=16).generate([PROMPTS[0]], max_tokens=4)
    assert done.tokens == solo_greedy(model, PROMPTS[0], 4)
    assert set(path_counts) == {"paged"}
    [warning] = caught
    assert str(warning.message) == (
        "MLX_PAGED_ATTENTION is 'fast': expected paged or gather; ignored"
    )


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("first", [0, 4])
def test_a_mask_shows_the_keys_up_to_a_query_and_within_its_window(window, first):
    queries, keys = np.arange(5, 11)[:, None], np.arange(first, 11)[None]
    expected = (keys <= queries) & (keys > queries - (window or 100))
    mask = causal_mask(mx.array(queries), 11, causal(window), first)
    np.testing.assert_array_equal(np.array(mask), expected)


@pytest.mark.parametrize(
    ("architecture", "length", "window", "dtype", "calls"),
    [
        ("applegpu_g17s", 1024, None, mx.float16, 1),
        ("applegpu_g17s", 1023, None, mx.float16, 2),
        ("applegpu_g17s", 1024, 700, mx.float16, 2),
        ("applegpu_g17s", 1024, None, mx.float32, 2),
        ("applegpu_g16s", 1024, None, mx.float16, 2),
    ],
)
def test_long_chunks_of_wide_heads_are_one_call_of_matrix_units(
    architecture, length, window, dtype, calls, gpu, monkeypatch
):
    """MLX's kernel takes 1,024 queries of 256 dimensions, unless a window makes the mask an array.
    Fewer have their scores in memory, some after the others."""
    seen = []

    def attention(q, k, v, **options):
        seen.append(q.shape[2])
        return q

    monkeypatch.setattr(forward, "mlx_attention", attention)
    monkeypatch.setattr(forward, "SCORES", 8 * 2048 * 600)
    pool = KVPool([KVShape(8, 256, 256, dtype)], 128, 16)
    layer = LayerView(pool, 0, causal(window))
    chunk = Chunk(0, 2048 - length, length, mx.arange(128))
    gpu(architecture)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    q = mx.zeros((1, 8, length, 256), dtype)
    layer.gathered_chunk(Query(q, 1.0, causal(window), None), chunk)
    assert len(seen) == calls and sum(seen) == length


@pytest.mark.parametrize("kv_bits", [8, 6, 4])
def test_a_gathered_chunk_transforms_its_queries_and_outputs_alone(kv_bits, monkeypatch):
    shape = KVShape(2, 64, 64, mx.float32).quantized("test", kv_bits)
    pool, rng = KVPool([shape], 16, 16), np.random.default_rng(0)
    rows = [mx.array(rng.standard_normal((256, 2, 64), np.float32)) for _ in range(2)]
    pool.write(0, *rows, mx.arange(256, dtype=mx.int32))
    q = mx.array(rng.standard_normal((1, 4, 32, 64), np.float32))
    chunk, layer = Chunk(0, 208, 32, mx.arange(15)), LayerView(pool, 0)
    k, v = pool.read(0, lambda a: ops.gather_blocks(a, chunk.block_ids[None], 240))
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")
    transformed, hadamard = [], ops.hadamard

    def counted(array):
        transformed.append(array.shape)
        return hadamard(array)

    monkeypatch.setattr(ops, "hadamard", counted)
    got = layer.gathered_chunk(Query(q, 0.125, FULL, None), chunk)
    assert transformed == [q.shape, q.shape]
    np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-6)
