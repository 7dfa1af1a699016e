"""What the public op takes, refuses and survives, and which kernel it chooses."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.ops import dispatch, fallback, paged
from tests.support.ops.paged_cases import (
    FLOAT32_ERROR,
    answer_by,
    assert_matches_float64,
    attend,
    memory_limit,
    random_case,
    worst_error,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


class TestLayers:
    def layers(self):
        """Three layers of keys and values for one batch."""
        case = random_case([45, 7])
        scales = mx.array([1.0, 2.0, -1.0])[:, None, None, None, None]
        k_cache, v_cache = case.k_cache[None] * scales, case.v_cache[None] * scales
        mx.eval(k_cache, v_cache)
        return case, k_cache, v_cache

    @pytest.mark.parametrize("layer_idx", [0, 1, 2])
    def test_one_array_or_a_list(self, layer_idx, kernel):
        case, k_cache, v_cache = self.layers()
        got = ops.paged_attention(
            case.q, k_cache, v_cache, case.block_tables, case.context_lens, layer_idx
        )
        case.k_cache, case.v_cache = k_cache[layer_idx], v_cache[layer_idx]
        want, _ = case.expected()
        assert worst_error(got, want) < FLOAT32_ERROR
        listed = ops.paged_attention(
            case.q, list(k_cache), list(v_cache), *case.arrays[3:], layer_idx
        )
        assert mx.array_equal(got, listed)

    @pytest.mark.parametrize("layer_idx", [-1, 3, True, 1.0, np.int64(3), np.float32(1), "1", None])
    @pytest.mark.parametrize("form", [list, mx.array])
    def test_there_is_no_such_layer(self, layer_idx, form):
        case, k_cache, v_cache = self.layers()
        with pytest.raises(ValueError, match=r"layer_idx is .*: expected an integer from 0 to 2"):
            ops.paged_attention(case.q, form(k_cache), v_cache, *case.arrays[3:], layer_idx)

    @pytest.mark.parametrize("form", [list, mx.array])
    def test_an_integer_of_numpy_is_a_layer(self, form):
        case, k_cache, v_cache = self.layers()
        arrays = case.q, form(k_cache), form(v_cache), *case.arrays[3:]
        got = ops.paged_attention(*arrays, np.int64(1))
        assert mx.array_equal(got, ops.paged_attention(*arrays, 1))

    @pytest.mark.parametrize("layer_idx", [0, 2])
    @pytest.mark.parametrize("form", [list, mx.array])
    def test_caches_have_equally_many_layers(self, layer_idx, form):
        case, k_cache, v_cache = self.layers()
        with pytest.raises(ValueError, match="v_cache has 2 layers and k_cache 3: expected the sa"):
            ops.paged_attention(case.q, form(k_cache), v_cache[:2], *case.arrays[3:], layer_idx)
        with pytest.raises(ValueError, match="v_cache has 3 layers and k_cache 2: expected the sa"):
            ops.paged_attention(case.q, k_cache[:2], form(v_cache), *case.arrays[3:], layer_idx)
        with pytest.raises(ValueError, match=r"v_cache has 0 layers and k_cache 0: .* at least 1"):
            ops.paged_attention(case.q, [], [], *case.arrays[3:])

    def test_one_layer_is_not_a_cache(self):
        case = random_case([5])
        with pytest.raises(ValueError, match=r"k_cache has shape .*expected \(n_layers"):
            ops.paged_attention(*case.arrays)

    def test_reading_a_layer_copies_nothing(self):
        k_cache = v_cache = mx.zeros((2, 4, 512, 16, 64))
        q, tables, lens = mx.zeros((1, 4, 1, 64)), mx.array([[3]]), mx.array([16])
        mx.eval(k_cache, q, tables, lens)
        with memory_limit(k_cache.nbytes // 16):
            mx.eval(ops.paged_attention(q, k_cache, v_cache, tables, lens, 1))


class TestKernelChoice:
    def test_cpus_have_a_kernel_for_any_heads(self):
        for device in (None, mx.cpu, mx.Device(mx.cpu, 0), mx.default_stream(mx.cpu)):
            assert ops.kernel_for(device) == "native"
            assert ops.kernel_for(device, 65, 1) == "native"

    def test_gpus_have_one_for_the_heads_of_metal(self, monkeypatch):
        for device in (mx.gpu, mx.Device(mx.gpu, 0)):
            monkeypatch.setattr(paged._ext.metal, "has_metal", lambda: False)
            assert ops.kernel_for(device) == "reference"
            monkeypatch.setattr(paged._ext.metal, "has_metal", lambda: True)
            assert ops.kernel_for(device) == "native"
            assert ops.kernel_for(device, 576, 512) == "native"
            assert ops.kernel_for(device, 65, 64) == "reference"
            assert ops.kernel_for(device, 64, 580) == "reference"

    def test_gpus_copy_blocks_of_any_width(self, monkeypatch):
        """Those of scales have one or two columns."""
        monkeypatch.setattr(paged._ext.metal, "has_metal", lambda: True)
        monkeypatch.setattr(dispatch, "device_of", lambda stream: mx.gpu)
        monkeypatch.setattr(paged.fallback, "copy_blocks", lambda *arrays: 1 / 0)
        scales = [mx.zeros((4, 2, 8, columns), mx.float16).swapaxes(0, 1) for columns in (1, 2)]
        mx.eval(scales)
        ops.copy_blocks(*scales, mx.array([[0, 1]], mx.int32))

    def test_a_stream_of_each_thread_will_do(self):
        """As an argument, and as the current stream."""
        case = random_case([45, 7])
        stream = mx.new_thread_local_stream(mx.cpu)
        assert ops.kernel_for(stream) == "native"
        given = attend(case, stream=stream)
        with mx.stream(stream):
            assert ops.kernel_for() == "native"
            current = attend(case)
        assert all(mx.array_equal(a, b) for a, b in zip(given, current, strict=True))

    def test_on_a_gpu_the_op_asks_for_its_own_heads(self, monkeypatch):
        asked = []
        monkeypatch.setattr(dispatch, "device_of", lambda stream: mx.gpu)

        def kernel_for(stream=None, *head_dims):
            asked.append(head_dims)
            return "native"

        answer_by(monkeypatch, kernel_for)
        attend(random_case([5], head_dim=24, v_head_dim=40))
        assert asked == [(24, 40)]

    def test_compiled_kernel_runs_on_the_stream_asked_for(self, monkeypatch):
        used = []
        monkeypatch.setattr(
            paged._ext, "paged_attention", lambda *args, stream, **options: used.append(stream)
        )
        case = random_case([5])
        arrays = (case.q, [case.k_cache], [case.v_cache], *case.arrays[3:])
        stream = mx.new_stream(mx.cpu)
        ops.paged_attention(*arrays, stream=stream)
        ops.paged_attention(*arrays)
        assert used == [stream, None]

    def test_reference_runs_on_the_stream_asked_for(self, monkeypatch):
        used = []
        answer_by(monkeypatch, lambda *_: "reference")
        monkeypatch.setattr(
            fallback,
            "paged_attention",
            lambda *args, **options: used.append(mx.default_stream(mx.cpu)),
        )
        case = random_case([5])
        arrays = (case.q, [case.k_cache], [case.v_cache], *case.arrays[3:])
        stream = mx.new_stream(mx.cpu)
        ops.paged_attention(*arrays, stream=stream)
        ops.paged_attention(*arrays)
        assert used == [stream, mx.default_stream(mx.cpu)]

    def test_answers_on_another_stream(self, kernel):
        case = random_case([45])
        want, _ = attend(case, kernel)
        got, _ = attend(case, kernel, stream=mx.new_stream(mx.cpu))
        assert mx.array_equal(got, want)


class TestErrors:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        ("argument", "value", "message"),
        [
            ("q", mx.zeros((4, 64)), r"q has shape \(4, 64\)"),
            ("q", mx.zeros((2, 4, 1, 32)), "k_cache"),
            ("q", mx.zeros((2, 5, 1, 64)), "2 KV heads"),
            ("q", mx.zeros((2, 4, 1, 64), mx.int32), "q .*dtype"),
            ("k_cache", [mx.zeros((2, 5, 64))], "k_cache"),
            ("v_cache", [mx.zeros((2, 5, 8, 64))], "v_cache"),
            ("v_cache", [mx.zeros((2, 7, 16, 64), mx.float16)], "v_cache"),
            ("block_tables", mx.zeros((3, 4), mx.int32), "q has batch 2: expected"),
            ("block_tables", mx.zeros((2, 4)), "block_tables .*int32"),
            ("context_lens", mx.zeros((3,), mx.int32), "context_lens"),
            ("context_lens", mx.zeros((2,)), "context_lens .*int32"),
            ("kv_head_mapping", mx.zeros((3,), mx.int32), "kv_head_mapping"),
            (
                "kv_head_mapping",
                mx.array([0, 1, 2, 0]),
                r"kv_head_mapping\[2\] is 2: expected 0 to 1",
            ),
            ("kv_head_mapping", mx.array([0, -1, 1, 0]), r"kv_head_mapping\[1\] is -1"),
            ("rope_freqs", mx.zeros((2, 33)), "rope_freqs"),
            ("rope_freqs", mx.zeros((3, 32)), "rope_freqs"),
            ("attn_mask", mx.zeros((2, 1, 1, 45)), "attn_mask"),
            ("attn_mask", mx.zeros((2, 1, 1, 1)), "attn_mask"),
            ("attn_mask", mx.zeros((64,), mx.int32), "attn_mask .*dtype"),
            ("attn_mask", mx.zeros((64,), mx.float64), "attn_mask .*expected bool, float32"),
            ("sinks", mx.zeros((4,), mx.float64), "sinks .*expected float32, float16 or bfloat16"),
            ("window", 0, "window is 0"),
            ("window", True, "window is True: expected an integer from 1 to 2147483647"),
            ("window", 1.5, "window is 1.5: expected an integer"),
            ("window", 2**31, "window is 2147483648: expected an integer from 1 to 2147483647"),
            ("sinks", mx.zeros((2,)), "sinks"),
            ("softcap", 0.0, "softcap is 0"),
            ("softcap", -1.0, "softcap is -1"),
            ("softcap", True, "softcap is True: expected a number"),
            ("scale", True, "scale is True: expected a number"),
            ("alibi_slopes", mx.zeros((5,)), "alibi_slopes"),
            ("scale", float("nan"), "scale is nan"),
        ],
    )
    def test_wrong_arguments(self, argument, value, message, kernel):
        case = random_case([45, 7])
        names = ["q", "k_cache", "v_cache", "block_tables", "context_lens"]
        arguments = dict(zip(names, case.arrays, strict=True))
        arguments["k_cache"], arguments["v_cache"] = [case.k_cache], [case.v_cache]
        with pytest.raises(ValueError, match=r"^\[paged_attention\] .*" + message):
            ops.paged_attention(**{**arguments, argument: value})

    @pytest.mark.parametrize(
        ("tables", "lens", "message"),
        [
            ([[0, 1], [2, 3]], [3, 33], r"context_lens\[1\] is 33: expected 0 to 32"),
            ([[0, 1], [2, 3]], [-1, 3], r"context_lens\[0\] is -1"),
            ([[0, 1], [2, 7]], [3, 17], r"block_tables\[1, 1\] is 7 .*expected 0 to 6"),
            ([[0, 1], [-1, 3]], [3, 1], r"block_tables\[1, 0\] is -1"),
        ],
    )
    def test_wrong_data(self, tables, lens, message, kernel):
        cache = [mx.zeros((2, 7, 16, 64))]
        q = mx.zeros((2, 4, 1, 64))
        tables, lens = mx.array(tables), mx.array(lens)
        with pytest.raises(ValueError, match=r"^\[paged_attention\] " + message):
            ops.paged_attention(q, cache, cache, tables, lens)
        ops.paged_attention(q, cache, cache, tables, lens, check_tables=False)

    def test_entries_that_no_context_reads_may_be_anything(self, kernel):
        cache = [mx.zeros((2, 7, 16, 64))]
        q, tables = mx.zeros((2, 4, 1, 64)), mx.array([[0, -1], [2**31 - 1, -5]])
        ops.paged_attention(q, cache, cache, tables, mx.array([16, 0]))


class TestDataSafety:
    """Values that nobody could check beforehand: never a crash, never poison."""

    @staticmethod
    def unevaluated(values):
        return mx.array(np.array(values, np.int32)) + mx.zeros((), mx.int32)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("stranger", [-1, -(2**31), 10**6, 2**31 - 1])
    @pytest.mark.parametrize("num_tokens", [1, 5], ids="L{}".format)
    def test_blocks_outside_the_pool_are_not_attended(self, stranger, num_tokens, kernel):
        case = random_case([45, 700, 16], num_tokens=num_tokens, options=["sinks"])
        tables = np.array(case.block_tables)
        tables[0, 1] = tables[1, 40] = tables[1, 43] = tables[2, 0] = stranger
        case.block_tables = self.unevaluated(tables)
        assert_matches_float64(case, kernel)

    @pytest.mark.parametrize("stranger", [-1, 2])
    def test_heads_mapped_nowhere_yield_zeros(self, stranger, kernel):
        case = random_case([45, 700], num_tokens=2)
        case.options["kv_head_mapping"] = self.unevaluated([1, stranger, 0, 2**31 - 1])
        assert_matches_float64(case, kernel)
        assert not case.expected()[0][:, 1::2].any()

    @pytest.mark.parametrize("option", ["window_21", "alibi", "non_causal"])
    def test_contexts_are_clamped_to_their_table(self, option, kernel):
        """The pool is full, and queries sit at the end of what the table addresses."""
        case = random_case([64, 64, 64], num_tokens=3, options=[option, "sinks"])
        case.block_tables = case.block_tables[:, :4]
        case.context_lens = self.unevaluated([65, 2**31 - 1, -(2**31)])
        assert_matches_float64(case, kernel)

    @pytest.mark.parametrize("shape", ["no_blocks", "no_table", "no_sequences", "no_tokens"])
    def test_empty_arrays(self, shape, kernel):
        case = random_case([] if shape == "no_sequences" else [5, 6], num_tokens=2)
        if shape == "no_blocks":
            case.k_cache, case.v_cache = case.k_cache[:, :0], case.v_cache[:, :0]
        if shape == "no_table":
            case.block_tables = case.block_tables[:, :0]
        if shape == "no_tokens":
            case.q = case.q[:, :, :0]
        assert_matches_float64(case, kernel, check_tables=False)

    def test_checks_do_not_wait(self):
        """Tables that depend on 64 MB of zeros stay unevaluated."""
        case = random_case([45])
        large = mx.zeros((2**24,), mx.int32) + 0
        tables = case.block_tables + large.sum()
        with memory_limit(2**20):
            ops.paged_attention(case.q, [case.k_cache], [case.v_cache], tables, case.context_lens)


def test_compiled_functions():
    """mx.compile traces with tables that hold nothing to check yet, merges calls that are the same
    and only these, and runs what it traced on new data."""
    case = random_case([45, 7])

    @mx.compile
    def compiled(q, k_cache, v_cache, tables, lens):
        arrays = q, [k_cache], [v_cache], tables, lens
        return -ops.paged_attention(*arrays), -ops.paged_attention(*arrays, window=3)

    for lens in ([45, 7], [44, 3]):
        case.context_lens = mx.array(lens)
        out, windowed = compiled(*case.arrays)
        assert mx.array_equal(-out, attend(case)[0])
        assert mx.array_equal(-windowed, attend(case, window=3)[0])


def test_install_in_mlx():
    assert not hasattr(mx.fast, "paged_attention")
    ops.install_in_mlx()
    ops.install_in_mlx()
    assert mx.fast.paged_attention is ops.paged_attention
    ops.uninstall_from_mlx()
    ops.uninstall_from_mlx()
    assert not hasattr(mx.fast, "paged_attention")
