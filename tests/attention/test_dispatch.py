"""A table decides which path attends, and both give mlx-lm's answer."""

import json
import warnings

import mlx.core as mx
import numpy as np
import pytest
from attention_paths import LLAMA, attending_by, table
from mlx_lm.generate import generate_step
from paged_cases import TOLERANCE, random_case, worst_error
from tiny_models import VOCAB, solo_greedy, tiny_model

from mlx_paged import Engine
from mlx_paged.attention import dispatch
from mlx_paged.attention.chunks import Chunk
from mlx_paged.attention.dispatch import VARIABLE, Dispatcher, dispatcher, table_path, write_table
from mlx_paged.attention.path_table import AttentionPath, Heads, PathTable, Timing
from mlx_paged.attention.pool_attention import PoolAttention, calls
from mlx_paged.drop_in.base_cache import LayerView
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.kv.pool import KVPool, KVShape

BLOCK = 4
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (40, 5, 33)]
SHORT_PAGED = [(1, 64, 1.0, 2.0), (64, 64, 2.0, 1.0)]
SHORT_GATHERED = [(1, 64, 2.0, 1.0), (64, 64, 1.0, 2.0)]


@pytest.fixture(autouse=True)
def _no_table_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(dispatch.sys, "platform", "linux")
    dispatcher.cache_clear()
    yield
    dispatcher.cache_clear()


def pool_of(case) -> KVPool:
    """The case's K/V as a pool; where a table means nothing it names block 0, as in an engine."""
    heads, num_blocks, block_size, head_dim = case.k_cache.shape
    shape = KVShape(heads, head_dim, case.v_cache.shape[3], case.k_cache.dtype)
    pool = KVPool([shape], num_blocks, block_size)
    pool.k[0], pool.v[0] = case.k_cache, case.v_cache
    tables = np.array(case.block_tables)
    case.block_tables = mx.array(np.where((tables >= 0) & (tables < num_blocks), tables, 0))
    return pool


def attention_of(case) -> PoolAttention:
    window, sinks = (case.options.get(name) for name in ("window", "sinks"))
    return PoolAttention(pool_of(case), 0, case.scale, window, sinks)


def assert_like_float64(out, case) -> None:
    expected, _ = case.expected()
    assert worst_error(out, expected) <= TOLERANCE[out.dtype]


@pytest.mark.parametrize(
    "options", [(), ("window_21",), ("sinks",), ("window_21", "sinks")], ids=str
)
@pytest.mark.parametrize("length", [2, 9, 37])
@pytest.mark.parametrize("path", list(AttentionPath))
def test_both_paths_attend_a_chunk_as_float64_does(path, length, options):
    case = random_case([37], num_tokens=length, block_size=BLOCK, options=options)
    attention = attention_of(case)
    blocks = case.block_tables[0, : -(-37 // BLOCK)]
    with attending_by(path):
        out = attention.chunk(case.q, Chunk(0, 37 - length, length, blocks))
    assert calls == {path: 1}
    assert_like_float64(out, case)


@pytest.mark.parametrize(
    "options", [(), ("window_21",), ("sinks",), ("window_21", "sinks")], ids=str
)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("path", list(AttentionPath))
def test_both_paths_attend_ragged_rows_as_float64_does(path, length, options):
    case = random_case([3, 29, 16], num_tokens=length, block_size=BLOCK, options=options)
    attention = attention_of(case)
    with attending_by(path):
        out = attention.rows(case.q, case.block_tables, case.context_lens)
    assert calls == {path: 1}
    assert_like_float64(out, case)


@pytest.mark.parametrize(
    ("path", "columns", "num_calls"),
    [("paged", 2, 1), ("paged", 9, 1), ("gather", 2, 1), ("gather", 9, 3)],
)
def test_rows_of_a_padded_forward_are_gathered_one_by_one_if_long(path, columns, num_calls):
    contexts = np.array([12, 29, 16], np.int32)
    case = random_case(contexts.tolist(), num_tokens=columns, block_size=BLOCK)
    pool = pool_of(case)
    spans = PaddedSpans.of(contexts - np.int32(columns), columns)
    step = PaddedBatch((0, 1, 2), spans, np.array(case.block_tables), BLOCK)
    with attending_by(path):
        out = LayerView(pool, step, None).attend(case.q, case.scale, None, None)
    assert calls == {path: num_calls}
    assert_like_float64(out, case)


@pytest.mark.parametrize("path", list(AttentionPath))
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_an_engine_gives_mlx_lms_tokens_on_a_forced_path(model_type, path):
    model = tiny_model(model_type)
    expected = [solo_greedy(model, prompt, 12) for prompt in PROMPTS]
    with attending_by(path):
        engine = Engine(model, block_size=BLOCK, num_blocks=100, prefill_chunk=16)
        done = engine.generate(PROMPTS, max_tokens=12)
    assert [completion.tokens for completion in done] == expected
    assert set(calls) == {path}


@pytest.mark.parametrize("path", list(AttentionPath))
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
    assert set(calls) == {path}


@pytest.mark.parametrize(
    ("rows", "of_chunk", "of_decodes"),
    [(SHORT_PAGED, "gather", "paged"), (SHORT_GATHERED, "paged", "gather")],
)
def test_a_table_decides_for_chunks_and_for_decodes(rows, of_chunk, of_decodes, tmp_path):
    model, [prompt, *_] = tiny_model("llama"), PROMPTS
    with attending_by(table(rows), tmp_path):
        engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=64)
        engine.generate([prompt], max_tokens=12)
    n_layers = len(engine.manager.k)
    # the last layer computes the last token of the prompt alone, a row like a decode
    assert calls == {of_chunk: n_layers - 1, of_decodes: n_layers * 11 + 1}


@pytest.mark.parametrize(
    ("length", "context", "path"),
    [
        (4, 100, "paged"),  # as measured
        (64, 100, "gather"),
        (15, 100, "paged"),  # four times 4 is a fourth of 64: there they are level
        (17, 100, "gather"),
        (1, 100, "paged"),  # beyond what was measured, as at its edge
        (999, 100, "gather"),
        (0, 0, "paged"),
        (4, 10, "paged"),
        (4, 390, "paged"),  # of contexts alike: level at 400
        (4, 410, "gather"),
        (4, 9999, "gather"),
    ],
)
def test_between_measurements_the_gain_is_interpolated(length, context, path):
    rows = [(4, 100, 1.0, 4.0), (4, 1600, 4.0, 1.0), (64, 100, 4.0, 1.0), (64, 1600, 4.0, 1.0)]
    assert Dispatcher(table(rows)).path(LLAMA, length, context) == path


def test_of_the_kinds_measured_the_one_most_like_it_counts():
    small, large = Heads("cpu", "float16", 4, 64, 64), Heads("cpu", "float16", 8, 128, 128)
    paged, gather = [Timing(1, 1, 1.0, 2.0)], [Timing(1, 1, 2.0, 1.0)]
    faster = PathTable({small: paged, large: gather}).faster
    assert faster(Heads("cpu", "float16", 4, 80, 64), 1, 1) == "paged"
    assert faster(Heads("cpu", "float16", 8, 256, 128), 1, 1) == "gather"
    assert faster(Heads("cpu", "float32", 8, 128, 128), 1, 1) is None
    assert faster(Heads("gpu", "float16", 8, 128, 128), 1, 1) is None


def test_where_nothing_was_measured_few_queries_take_the_paged_op():
    paths = [Dispatcher(PathTable({})).path(LLAMA, length, 5000) for length in (1, 8, 9, 512)]
    assert paths == ["paged", "paged", "gather", "gather"]


def test_a_device_without_a_kernel_goes_by_no_table(tmp_path, monkeypatch):
    case = random_case([37], num_tokens=20, block_size=BLOCK)
    attention = attention_of(case)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    rows = [(1, 64, 1.0, 2.0)]
    with attending_by(table(rows, Heads("gpu", "float32", 2, 64, 64)), tmp_path):
        assert attention.path(case.q, 37) == "gather"
        monkeypatch.setattr("mlx_paged.ops.kernel_for", lambda *_: "native")
        assert attention.path(case.q, 37) == "paged"


def test_heads_that_share_a_kv_head_are_a_group(tmp_path):
    case = random_case([37], num_tokens=4, block_size=BLOCK)
    (_, num_heads, _, _), (n_kv_heads, *_, head_dim) = case.q.shape, case.k_cache.shape
    assert n_kv_heads > 1
    group, all_heads = (
        Heads("cpu", "float32", n, head_dim, head_dim) for n in (num_heads // n_kv_heads, num_heads)
    )
    timings = {group: [Timing(4, 37, 1.0, 2.0)], all_heads: [Timing(4, 37, 2.0, 1.0)]}
    with attending_by(PathTable(timings), tmp_path):
        assert attention_of(case).path(case.q, 37) == "paged"


def test_a_window_ends_the_context_that_counts(tmp_path):
    case = random_case([37], num_tokens=4, block_size=BLOCK)
    heads = Heads("cpu", "float32", 2, 64, 64)
    rows = [(4, 20, 1.0, 2.0), (4, 21, 2.0, 1.0)]
    pool = pool_of(case)
    with attending_by(table(rows, heads), tmp_path):
        paths = [PoolAttention(pool, 0, 1.0, w, None).path(case.q, 37) for w in (17, 18, None)]
    assert paths == ["paged", "gather", "gather"]


def test_the_same_table_gives_the_same_paths_in_any_order():
    rng = np.random.default_rng(0)
    rows = [
        (int(n), int(c), *rng.uniform(1, 2, 2).tolist())
        for n, c in rng.integers(1, 4096, (12, 2)).tolist()
    ]
    asked = [(int(n), int(c)) for n, c in rng.integers(1, 5000, (3000, 2)).tolist()]
    answers = [Dispatcher(table(rows)).path(LLAMA, *each) for each in asked]
    backwards = Dispatcher(PathTable.from_json(json.loads(json.dumps(table(rows).as_json()))))
    assert [backwards.path(LLAMA, *each) for each in reversed(asked)] == answers[::-1]
    assert set(answers) == set(AttentionPath)


def test_a_written_table_is_found_and_keeps_the_kinds_of_the_one_before():
    other = Heads("cpu", "bfloat16", 4, 64, 64)
    write_table(table_path(), table(SHORT_GATHERED))
    write_table(table_path(), table(SHORT_GATHERED, other))
    write_table(table_path(), table(SHORT_PAGED))
    known = dispatcher().table
    assert known.timings == {
        LLAMA: [Timing(*row) for row in SHORT_PAGED],
        other: [Timing(*row) for row in SHORT_GATHERED],
    }
    assert dispatcher().path(LLAMA, 64, 64) == "gather"
    assert [path.name for path in table_path().parent.iterdir()] == ["attention_paths.json"]


KIND = {"device": "cpu", "dtype": "float32", "group": 2, "head_dim": 16, "v_head_dim": 16}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "\x00\xff",
        "[]",
        "{}",
        json.dumps({"version": 999, "kinds": []}),
        json.dumps({"version": 1, "kinds": 3}),
        json.dumps({"version": 1, "kinds": [KIND]}),
        json.dumps({"version": 1, "kinds": [KIND | {"timings": [[1, 2, 3]]}]}),
        json.dumps({"version": 1, "kinds": [KIND | {"timings": [[1, 2, 3, 0]]}]}),
        json.dumps({"version": 1, "kinds": [KIND | {"timings": [[1, 2, 0, 3]]}]}),
        json.dumps({"version": 1, "kinds": [KIND | {"timings": [[0, 2, 3, 4]]}]}),
        json.dumps({"version": 1, "kinds": [KIND | {"timings": [[1, 2, 3, float("nan")]]}]}),
        json.dumps({"version": 1, "kinds": [KIND | {"group": 0, "timings": []}]}),
        None,
    ],
)
def test_a_broken_table_costs_one_warning_and_nothing_else(content):
    path = table_path()
    path.parent.mkdir(parents=True)
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="latin-1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = tiny_model("llama")
        [done] = Engine(model, num_blocks=16).generate([PROMPTS[0]], max_tokens=4)
        known = dispatcher().table
    assert done.tokens == solo_greedy(model, PROMPTS[0], 4)
    [warning] = caught
    assert str(warning.message).startswith(f"the table of attention paths {path} is not used: ")
    assert known.as_json() == dispatch.shipped_table().as_json()


def test_no_table_of_the_users_is_no_mistake_but_a_named_one_must_be_there(tmp_path):
    assert dispatcher().table.as_json() == dispatch.shipped_table().as_json()
    with (
        attending_by(str(tmp_path / "none.json")),
        pytest.warns(UserWarning, match=r"none\.json is not used: .*No such file"),
    ):
        dispatcher()


def test_default_means_the_shipped_table_whatever_the_user_has():
    write_table(table_path(), table(SHORT_PAGED))
    with attending_by("default"):
        assert dispatcher().table.as_json() == dispatch.shipped_table().as_json()
    assert LLAMA in dispatcher().table.timings


def test_the_shipped_table_names_its_machine_and_knows_no_gpu():
    shipped = dispatch.shipped_table()
    assert {heads.device for heads in shipped.timings} == {shipped.about["device"]} == {"cpu"}
    assert shipped.about["cpu"] and shipped.about["blas"] and shipped.about["cores"] >= 1
    gpu = Heads("gpu", "float16", 4, 128, 128)
    paths = [Dispatcher(shipped).path(gpu, length, 4096) for length in (1, 512)]
    assert paths == ["paged", "gather"]


def test_tables_are_cached_where_the_system_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert table_path() == tmp_path / "caches" / "mlx_paged" / "attention_paths.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert table_path().parent == tmp_path / ".cache" / "mlx_paged"
    monkeypatch.setattr(dispatch.sys, "platform", "darwin")
    assert table_path().parent == tmp_path / "Library" / "Caches" / "mlx_paged"
