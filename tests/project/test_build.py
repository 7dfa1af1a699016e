"""The compiled module as built: its arrays are MLX's, its refusals, its builds for several CPUs."""

import ast
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext

B, H, H_KV, L, D, D_V, N, S, M, T = 2, 4, 2, 3, 8, 6, 5, 4, 2, 3

# Runs the module alone, without the package around it, and writes an array to standard output.
CHILD = """
import importlib.util, sys
import mlx.core as mx, numpy as np
spec = importlib.util.spec_from_file_location("mlx_paged._ext", sys.argv[1])
_ext = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_ext)
sys.path.insert(0, sys.argv[2])
from test_build import outputs_for_comparison
np.savez(sys.stdout.buffer, name=_ext.cpu_features(), threads=_ext.num_threads(),
         **outputs_for_comparison(_ext))
"""


def attention_arguments() -> dict:
    return dict(
        q=mx.zeros((B, H, L, D)),
        k_cache=mx.zeros((H_KV, N, S, D)),
        v_cache=mx.ones((H_KV, N, S, D_V)),
        block_tables=mx.array([[0, 1], [3, 2]], dtype=mx.int32),
        context_lens=mx.array([3, 8], dtype=mx.int32),
        scale=1.0,
    )


def write_arguments() -> dict:
    return dict(
        k=mx.ones((T, H_KV, D)),
        v=mx.ones((T, H_KV, D_V)),
        k_cache=mx.zeros((H_KV, N, S, D)),
        v_cache=mx.zeros((H_KV, N, S, D_V)),
        slot_mapping=mx.array([0, 5, -1], dtype=mx.int32),
    )


def copy_arguments() -> dict:
    return dict(
        k_cache=mx.zeros((H_KV, N, S, D)),
        v_cache=mx.zeros((H_KV, N, S, D_V)),
        block_pairs=mx.array([[0, 1]], dtype=mx.int32),
    )


ARGUMENTS = {
    "paged_attention": attention_arguments,
    "write_kv": write_arguments,
    "copy_blocks": copy_arguments,
}


def call(op: str, **changes):
    return getattr(_ext, op)(**{**ARGUMENTS[op](), **changes})


def outputs_for_comparison(ext) -> dict[str, np.ndarray]:
    """Outputs over every cache dtype and optional feature, over contexts of several splits."""
    rng = np.random.default_rng(0)
    context_lens = mx.array([1, 17, 130, 1300])
    batch, max_blocks, head_dim, value_dim = 4, 82, 40, 20
    num_blocks = batch * max_blocks
    tables = mx.array(rng.permutation(num_blocks).reshape(batch, max_blocks).astype(np.int32))
    features = {
        "plain": {},
        "window": {"window": 70, "sinks": mx.array(rng.standard_normal(6, np.float32))},
        "shaped": {
            "softcap": 3.0,
            "alibi_slopes": mx.array(rng.uniform(0, 0.1, 6).astype(np.float32)),
            "attn_mask": mx.array(rng.random((6, 1, max_blocks * 16)) < 0.7),
        },
    }
    outputs = {}
    # Six query rows share a KV head, or 36: enough for keys to be packed.
    for dtype, tokens in itertools.product((mx.float32, mx.float16, mx.bfloat16), (2, 12)):
        q, k, v = (
            mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
            for shape in (
                (batch, 6, tokens, head_dim),
                (2, num_blocks, 16, head_dim),
                (2, num_blocks, 16, value_dim),
            )
        )
        for name, options in features.items():
            out = ext.paged_attention(
                q.astype(mx.float32), k, v, tables, context_lens, scale=0.2, **options
            )
            outputs[f"{dtype}-{name}-{tokens}".removeprefix("mlx.core.")] = np.array(out)
    return outputs


def run_child(**environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", CHILD, _ext.__file__, str(Path(__file__).parent)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MLX_PAGED_")}
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, timeout=600)


def child_outputs(**environment: str) -> dict[str, np.ndarray]:
    child = run_child(**environment)
    assert child.returncode == 0, child.stderr.decode()
    return dict(np.load(io.BytesIO(child.stdout)))


class TestBindings:
    """A module built with another nanobind ABI imports and then rejects every array."""

    def test_paged_attention(self):
        out, attn = call("paged_attention", return_attn=True)
        assert isinstance(out, mx.array) and isinstance(attn, mx.array)
        assert out.shape == (B, H, L, D_V) and attn.shape == (B, H, L, M * S)
        assert mx.array_equal(out, mx.ones_like(out))
        assert call("paged_attention", stream=mx.cpu).shape == out.shape

    def test_every_optional_array(self):
        out = call(
            "paged_attention",
            kv_head_mapping=mx.array([0, 1, 1, 0], dtype=mx.int32),
            rope_freqs=mx.zeros((B, L, D // 2)),
            attn_mask=mx.ones((M * S,), dtype=mx.bool_),
            sinks=mx.full((H,), -1e9),
            alibi_slopes=mx.zeros((H,)),
        )
        assert mx.array_equal(out, mx.ones_like(out))

    def test_write_kv(self):
        k_cache, v_cache = call("write_kv")
        assert np.argwhere(np.array(k_cache).all(axis=(0, 3))).tolist() == [[0, 0], [1, 1]]
        assert np.argwhere(np.array(v_cache).all(axis=(0, 3))).tolist() == [[0, 0], [1, 1]]

    def test_copy_blocks(self):
        k_cache, v_cache = call("copy_blocks", k_cache=mx.ones((H_KV, N, S, D)))
        assert k_cache.shape == (H_KV, N, S, D) and v_cache.shape == (H_KV, N, S, D_V)
        assert mx.array_equal(k_cache, mx.ones_like(k_cache))

    def test_stub_names_every_function_and_argument(self):
        stub = ast.parse((Path(__file__).parents[2] / "mlx_paged/_ext.pyi").read_text())
        typed = {
            node.name: [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            for node in stub.body
            if isinstance(node, ast.FunctionDef)
        }
        compiled = {}
        for name, function in inspect.getmembers(_ext, callable):
            assert function.__doc__.count("\n") > 0, f"{name} has no docstring"
            if isinstance(function, type):
                assert name in {node.name for node in stub.body if isinstance(node, ast.ClassDef)}
                continue
            signature = re.sub(r"\[[^]]*\]", "", function.__doc__.partition("->")[0])
            compiled[name] = re.findall(r"(\w+):", signature)
        assert typed == compiled


def f32(*shape: int) -> mx.array:
    return mx.zeros(shape)


def f16(*shape: int) -> mx.array:
    return mx.zeros(shape, dtype=mx.float16)


def i32(*shape: int) -> mx.array:
    return mx.zeros(shape, dtype=mx.int32)


# An argument, a value that does not fit, and how the error message starts.
MISTAKES = {
    "paged_attention": [
        ("q", f32(H, L, D), "q has shape (4, 3, 8): expected (batch, num_heads,"),
        ("q", i32(B, H, L, D), "q of shape (2, 4, 3, 8) has dtype int32: expected float32,"),
        ("q", f32(B, H, L, 7), "q has shape (2, 4, 3, 7) but k_cache has (2, 5, 4, 8)"),
        ("q", f32(B, 3, L, D), "q has shape (2, 3, 3, 8) with 3 heads but k_cache has 2 KV heads"),
        ("q", f32(3, H, L, D), "block_tables has shape (2, 2) but q has batch 3: expected (3, max"),
        ("k_cache", f32(N, S, D), "k_cache has shape (5, 4, 8): expected (num_kv_heads,"),
        ("k_cache", i32(H_KV, N, S, D), "k_cache of shape (2, 5, 4, 8) has dtype int32"),
        ("v_cache", f32(H_KV, N, D_V), "v_cache has shape (2, 5, 6): expected (num_kv_heads,"),
        ("v_cache", f16(H_KV, N, S, D_V), "v_cache of shape (2, 5, 4, 6) has dtype float16 but"),
        ("v_cache", f32(H_KV, 9, S, D_V), "v_cache has shape (2, 9, 4, 6) but k_cache has (2, 5"),
        ("v_cache", f32(H_KV, N, S, 0), "v_cache has shape (2, 5, 4, 0): expected at least"),
        ("block_tables", f32(B, M), "block_tables of shape (2, 2) has dtype float32: expected int"),
        ("block_tables", i32(B, 2**29), "block_tables has shape (2, 536870912): with blocks of 4"),
        ("block_tables", i32(B), "block_tables has shape (2,) but q has batch 2: expected (2, max"),
        ("context_lens", i32(3), "context_lens has shape (3,) but q has batch 2: expected (2,)"),
        ("context_lens", f32(B), "context_lens of shape (2,) has dtype float32: expected int32"),
        ("scale", float("nan"), "scale is nan: expected a finite number"),
        ("kv_head_mapping", i32(3), "kv_head_mapping has shape (3,): expected (4,)"),
        ("kv_head_mapping", mx.array([0, 1, 2, 0]), "kv_head_mapping[2] is 2: expected 0 to 1"),
        ("kv_head_mapping", f32(H), "kv_head_mapping of shape (4,) has dtype float32"),
        ("rope_freqs", f32(B, 4), "rope_freqs has shape (2, 4) but q has shape (2, 4, 3, 8)"),
        ("rope_freqs", f32(B, L, 5), "rope_freqs has shape (2, 3, 5), 5 angles, but q has head d"),
        ("rope_freqs", i32(B, L, 4), "rope_freqs of shape (2, 3, 4) has dtype int32"),
        ("attn_mask", f32(L, 7), "attn_mask has shape (3, 7): expected one that broadcasts to (2,"),
        ("attn_mask", f32(L, 1), "attn_mask has shape (3, 1): expected one that broadcasts to (2,"),
        ("attn_mask", i32(M * S), "attn_mask of shape (8,) has dtype int32: expected bool"),
        ("window", 0, "window is 0: expected at least 1 key"),
        ("sinks", f32(3), "sinks has shape (3,): expected (4,)"),
        ("sinks", i32(H), "sinks of shape (4,) has dtype int32"),
        ("softcap", 0.0, "softcap is 0: expected a finite number above 0"),
        ("alibi_slopes", f32(H, 1), "alibi_slopes has shape (4, 1): expected (4,)"),
        ("context_lens", mx.array([0, 9]), "context_lens[1] is 9: expected 0 to 8"),
        ("context_lens", mx.array([-1, 0]), "context_lens[0] is -1: expected 0 to 8"),
        (
            "block_tables",
            mx.array([[9, 9], [1, 9]]),
            "block_tables[0, 0] is 9 and a context of 3 tokens",
        ),
    ],
    "write_kv": [
        ("k", f32(T, D), "k has shape (3, 8): expected (num_tokens, num_kv_heads, head_dim)"),
        ("k", f32(T, 1, D), "k has shape (3, 1, 8): expected (3, 2, 8)"),
        ("k", f16(T, H_KV, D), "k of shape (3, 2, 8) has dtype float16: expected the cache's"),
        ("v", f32(T + 1, H_KV, D_V), "v has shape (4, 2, 6): expected (3, 2, 6)"),
        ("v_cache", f32(H_KV, N, 3, D_V), "v_cache has shape (2, 5, 3, 6) but k_cache has (2, 5"),
        ("slot_mapping", i32(2), "slot_mapping has shape (2,): expected (3,)"),
        ("slot_mapping", f32(T), "slot_mapping of shape (3,) has dtype float32: expected int32"),
    ],
    "copy_blocks": [
        ("k_cache", f32(H_KV, N, S), "k_cache has shape (2, 5, 4): expected (num_kv_heads,"),
        ("block_pairs", i32(2), "block_pairs has shape (2,): expected (num_pairs, 2)"),
        ("block_pairs", f32(1, 2), "block_pairs of shape (1, 2) has dtype float32"),
    ],
}


@pytest.mark.parametrize(
    ("op", "argument", "value", "message"),
    [
        pytest.param(op, *mistake, id=f"{op}-{mistake[2]}")
        for op, mistakes in MISTAKES.items()
        for mistake in mistakes
    ],
)
def test_a_mistake_is_named(op, argument, value, message):
    call(op)
    checks = {"check_tables": True} if op == "paged_attention" else {}
    with pytest.raises(ValueError, match=re.escape(f"[{op}] {message}")):
        call(op, **checks, **{argument: value})


def test_unevaluated_tables_are_not_waited_for():
    lens = mx.array([99, 99], dtype=mx.int32) + 1
    call("paged_attention", context_lens=lens, check_tables=True)
    mx.eval(lens)
    with pytest.raises(ValueError, match=r"context_lens\[0\] is 100"):
        call("paged_attention", context_lens=lens, check_tables=True)


def test_a_pool_that_cannot_be_written_is_refused():
    broadcast = mx.broadcast_to(mx.zeros((1, 1, S, D)), (H_KV, N, S, D))
    with pytest.raises(ValueError, match=r"\[write_kv\] k_cache .* broadcast view along axis 0"):
        mx.eval(call("write_kv", k_cache=broadcast))
    strided = mx.zeros((H_KV, N, S, 2 * D))[..., ::2]
    with pytest.raises(ValueError, match=r"\[copy_blocks\] k_cache .* stride 2 on its last axis"):
        mx.eval(call("copy_blocks", k_cache=strided))


class TestZeroSizes:
    @pytest.mark.parametrize(
        ("batch", "tokens", "columns"), [(0, 1, M), (B, 0, M), (B, 1, 0)], ids=["B0", "L0", "M0"]
    )
    def test_paged_attention(self, batch, tokens, columns):
        out, attn = call(
            "paged_attention",
            q=mx.zeros((batch, H, tokens, D)),
            block_tables=mx.zeros((batch, columns), dtype=mx.int32),
            context_lens=mx.ones((batch,), dtype=mx.int32),
            return_attn=True,
        )
        mx.eval(out, attn)
        assert out.shape == (batch, H, tokens, D_V) and attn.shape == (
            batch,
            H,
            tokens,
            columns * S,
        )
        assert not np.array(out).any()

    @pytest.mark.parametrize("num_blocks", [0, N])
    def test_no_context(self, num_blocks):
        out = call(
            "paged_attention",
            k_cache=mx.full((H_KV, num_blocks, S, D), float("nan")),
            v_cache=mx.full((H_KV, num_blocks, S, D_V), float("nan")),
            context_lens=mx.zeros((B,), dtype=mx.int32),
        )
        assert mx.array_equal(out, mx.zeros_like(out))

    def test_no_rows_and_no_pairs(self):
        before = mx.random.normal((H_KV, N, S, D))
        no_rows = dict(
            k=mx.zeros((0, H_KV, D)),
            v=mx.zeros((0, H_KV, D_V)),
            slot_mapping=mx.zeros((0,), dtype=mx.int32),
        )
        after, _ = call("write_kv", k_cache=before, **no_rows)
        assert mx.array_equal(after, before)
        after, _ = call("copy_blocks", k_cache=before, block_pairs=mx.zeros((0, 2), dtype=mx.int32))
        assert mx.array_equal(after, before)


class TestBuilds:
    """One binary holds the attention kernel for several instruction sets."""

    @pytest.mark.slow
    def test_the_active_build_is_reported(self):
        assert _ext.supported_kernels()[0] == "baseline"
        assert _ext.cpu_features() in _ext.supported_kernels()
        assert child_outputs()["name"] == _ext.supported_kernels()[-1]

    @pytest.mark.slow
    @pytest.mark.parametrize("build", ["baseline", "avx2", "avx512"])
    def test_builds_agree(self, build):
        if build not in _ext.supported_kernels():
            pytest.skip(f"this machine cannot run the {build} build")
        got = child_outputs(MLX_PAGED_CPU=build)
        assert got["name"] == build
        for case, want in outputs_for_comparison(_ext).items():
            error = np.sqrt(np.mean((got[case] - want) ** 2) / np.mean(want**2))
            assert error < 1e-6, case

    def test_an_unknown_build_is_refused(self):
        child = run_child(MLX_PAGED_CPU="sse9")
        assert child.returncode != 0
        assert b"MLX_PAGED_CPU is 'sse9': expected one of baseline" in child.stderr


SETUP = """
import os, runpy, sys
import setuptools.command.build_ext, setuptools.command.build_py
setuptools.__version__, setuptools.setup, sys.platform = "77", lambda **options: None, sys.argv[2]
runpy.run_path(sys.argv[1])
print(os.environ.get("MACOSX_DEPLOYMENT_TARGET"))
"""


@pytest.mark.parametrize(
    ("system", "given", "expected"),
    [("darwin", "", "14.0"), ("darwin", "15.0", "15.0"), ("linux", "", "None")],
)
def test_a_wheel_is_for_the_oldest_macos_of_mlx(system, given, expected):
    """setup.py says so to CMake and to setuptools, unless the environment says more."""
    pytest.importorskip("_distutils_hack", reason="setuptools is not installed")
    name = "MACOSX_DEPLOYMENT_TARGET"
    environment = {k: v for k, v in os.environ.items() if k != name}
    environment |= {name: given} if given else {}
    path = Path(__file__).parents[2] / "setup.py"
    done = subprocess.run(
        [sys.executable, "-c", SETUP, path, system], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == expected, done.stderr


class TestThreads:
    @pytest.mark.slow
    def test_results_do_not_depend_on_their_number(self):
        few, many = (child_outputs(MLX_PAGED_NUM_THREADS=n) for n in ("1", "5"))
        assert (few.pop("threads"), many.pop("threads")) == (1, 5)
        assert all(np.array_equal(few[case], many[case]) for case in few)

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("value", ["0", "1025", "2.0", ""])
    def test_a_bad_number_is_refused(self, value):
        child = run_child(MLX_PAGED_NUM_THREADS=value)
        assert child.returncode != 0
        assert f"MLX_PAGED_NUM_THREADS is '{value}': expected an integer" in child.stderr.decode()


def test_a_row_depends_on_neither_its_batch_nor_its_chunk():
    """8192 rows over 8192 keys exceed the memory for partial states; 32 of them do not."""
    heads, tokens, context, block = 32, 256, 8192, 64
    q, k, v = (
        mx.random.normal(shape)
        for shape in (
            (1, heads, tokens, 1),
            (1, context // block, block, 1),
            (1, context // block, block, 1),
        )
    )
    tables = mx.arange(context // block, dtype=mx.int32)[None]
    lens = mx.array([context], dtype=mx.int32)
    whole = _ext.paged_attention(q, k, v, tables, lens, scale=1.0)
    last = _ext.paged_attention(q[:, :, -1:], k, v, tables, lens, scale=1.0)
    assert mx.array_equal(whole[:, :, -1:], last)
    pair = _ext.paged_attention(
        mx.repeat(q[:, :, -1:], 2, axis=0),
        k,
        v,
        mx.repeat(tables, 2, axis=0),
        mx.array([500, context], dtype=mx.int32),
        scale=1.0,
    )
    assert mx.array_equal(pair[1:], last)
