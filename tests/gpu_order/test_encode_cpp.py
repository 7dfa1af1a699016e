"""Reads and writes of a pool, as MLX's Metal encoders order them."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import _ext
from mlx_paged.kv.pool import KVPool, head_runs
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops import fallback as reference_mlx
from tests.gpu_order.encode_cpp import EncoderScript
from tests.support.ops.paged_cases import (
    MANY_OPTIONS,
    OPTIONS,
    Case,
    latent_case,
    primitives,
    random_case,
)

K, V = 1, 2
"""Buffers of a pool."""


def attention(case: Case, **options: Any) -> dict[str, Any]:
    return _ext.metal.plan_attention(*case.arrays, scale=1.0, **case.options, **options)


WRITTEN = "output", "scratch"
"""Roles of what the first launches of an op write."""


def mixed_step(contexts: list[int]) -> dict[str, Any]:
    """A decode and a chunk of 6 tokens."""
    case = random_case(contexts, dtype=mx.float16)
    q = mx.zeros((7, case.q.shape[1], 1, case.q.shape[3]), mx.float16)
    begins = mx.array([0, 1, 7])
    return _ext.metal.plan_attention(
        q, *case.arrays[1:], cu_seqlens=begins, scale=1.0, num_decodes=1
    )


def write(case: Case, num_tokens: int = 3) -> dict[str, Any]:
    pools = written_pools(case)
    heads = case.k_cache.shape[0]
    rows = (mx.zeros((num_tokens, heads, pool.shape[3]), pool.dtype) for pool in pools)
    return _ext.metal.plan_write_kv(*rows, *pools, mx.arange(num_tokens))


def copy(case: Case) -> dict[str, Any]:
    return _ext.metal.plan_copy_blocks(*written_pools(case), mx.array([[0, 1]]))


def written_pools(case: Case) -> tuple[mx.array, mx.array]:
    """Keys and values; of latents the two ranges of columns that a pool writes."""
    if case is not LATENT:
        return case.k_cache, case.v_cache
    latents, rotary_keys = mx.split(case.k_cache, [case.v_cache.shape[3]], axis=-1)
    mx.eval(latents, rotary_keys)
    return latents, rotary_keys


SHORT = random_case([45, 7])
LONG = random_case([3000], options=["sinks"])
LATENT = latent_case([45, 7], 64, 8)
OPS = {
    "attention": (attention, {1: K, 2: V}),
    "write": (write, {2: K, 3: V}),
    "copy": (copy, {0: K, 1: V}),
}


def check_roles(call: dict[str, Any], pools: set[int]) -> None:
    """Buffers of the pool have a role of their own, and none is without memory.

    Args:
        pools: indices of the inputs that are the pool's.
    """
    bound = set()
    for launch in call["launches"]:
        for _, role, which in launch["buffers"]:
            if role == "scratch":
                continue
            is_input = role in ("input", "pool_read")
            memory = which if is_input else call["outputs"][which]
            if isinstance(memory, int):
                assert role.startswith("pool") == (memory in pools)
                assert call["inputs"][memory].size > 0
                bound.add(memory)
            else:
                assert role == "output"
    assert bound >= pools


class TestPlans:
    @pytest.mark.parametrize("options", [(), *((name,) for name in OPTIONS), MANY_OPTIONS])
    @pytest.mark.parametrize("return_attn", [False, True])
    def test_attention_reads_pools(self, options, return_attn):
        case = random_case([45, 7], num_tokens=2, options=options)
        check_roles(attention(case, return_attn=return_attn), {1, 2})

    def test_attention_in_splits_reads_pools(self):
        assert len(attention(LONG)["launches"]) == 2
        check_roles(attention(LONG), {1, 2})

    def test_latent_attention_reads_pools(self):
        check_roles(attention(LATENT), {1, 2})

    def test_angles_that_rotate_nothing_are_not_bound(self):
        case = random_case([45, 7], num_tokens=2)
        case.options["rope_freqs"] = mx.zeros((2, 2, 0))
        check_roles(attention(case), {1, 2})

    @pytest.mark.parametrize("case", [SHORT, LATENT])
    def test_writes_and_copies_write_pools(self, case):
        check_roles(write(case), {2, 3})
        check_roles(copy(case), {0, 1})

    def test_what_has_no_memory_is_not_bound(self):
        empty = random_case([])
        empty.k_cache, empty.v_cache = empty.k_cache[:, :0], empty.v_cache[:, :0]
        calls = write(empty), copy(empty), write(SHORT, num_tokens=0), attention(random_case([]))
        assert [call["launches"] for call in calls] == [[]] * 4

    @pytest.mark.parametrize("empty", ["pool", "table"])
    def test_attention_without_keys_has_no_plan(self, empty):
        case = random_case([45, 7])
        if empty == "pool":
            case.k_cache, case.v_cache = case.k_cache[:, :0], case.v_cache[:, :0]
        else:
            case.block_tables = case.block_tables[:, :0]
        with pytest.raises(RuntimeError, match="k_cache or block_tables is empty"):
            attention(case)


class TestOtherEncoders:
    """Of one queue, whose encoders may run at once."""

    @pytest.mark.parametrize("writer", ["write", "copy"])
    @pytest.mark.parametrize("reader", ["attention", "take"])
    def test_a_write_waits_for_reads(self, reader, writer):
        script = EncoderScript()
        self.encode(script, reader)
        script.end()
        self.encode(script, writer)
        assert [encoded.waits_for for encoded in script.run()] == [[], [0]]

    @pytest.mark.parametrize("reader", ["attention", "take"])
    @pytest.mark.parametrize("writer", ["write", "copy"])
    def test_a_read_waits_for_writes(self, reader, writer):
        script = EncoderScript()
        self.encode(script, writer)
        script.end()
        self.encode(script, reader)
        assert [encoded.waits_for for encoded in script.run()] == [[], [0]]

    @pytest.mark.parametrize("reader", ["attention", "take"])
    def test_a_write_waits_for_all_reads(self, reader):
        """For the last one, which waits for the one before."""
        script = EncoderScript()
        for _ in range(3):
            self.encode(script, reader)
            script.end()
        self.encode(script, "write")
        assert [encoded.waits_for for encoded in script.run()] == [[], [0], [1], [2]]

    @pytest.mark.parametrize("reader", ["attention", "write"])
    def test_other_pools_wait_for_nothing(self, reader):
        script = EncoderScript()
        op, pools = OPS[reader]
        script.op(op(LONG), pools)
        script.end()
        script.op(op(LONG), {i: buffer + 10 for i, buffer in pools.items()})
        assert [encoded.waits_for for encoded in script.run()] == [[], []]

    @staticmethod
    def encode(script: EncoderScript, name: str) -> None:
        if name == "take":
            script.read(V, 1)
        else:
            op, pools = OPS[name]
            script.op(op(SHORT), pools)


class TestOneEncoder:
    """Whose launches run at once but for barriers."""

    @pytest.mark.parametrize("writer", ["write", "copy"])
    @pytest.mark.parametrize("reader_first", [False, True])
    def test_a_barrier_separates_reads_and_writes(self, writer, reader_first):
        script = EncoderScript()
        for name in ("attention", writer) if reader_first else (writer, "attention"):
            op, pools = OPS[name]
            script.op(op(SHORT), pools)
        assert script.run()[0].events == ["dispatch", "barrier", "dispatch"]

    @pytest.mark.parametrize("layers", [(0, 0), (0, 1)])
    def test_reads_run_at_once(self, layers):
        script = EncoderScript()
        for layer in layers:
            script.op(attention(SHORT), {1: K + 10 * layer, 2: V + 10 * layer})
        assert script.run()[0].events == ["dispatch"] * 2

    def test_splits_are_merged_once_they_are_there(self):
        script = EncoderScript()
        script.op(attention(LONG), {1: K, 2: V})
        assert script.run()[0].events == ["dispatch", "barrier", "dispatch"]

    @pytest.mark.parametrize("writer", ["write", "copy"])
    @pytest.mark.parametrize(
        ("contexts", "events"),
        [([45, 7], ["dispatch"]), ([900, 7], ["dispatch", "dispatch"])],
    )
    def test_decodes_and_chunks_run_at_once(self, contexts, events, writer):
        """Though they write parts of one array. The merge, if there is one, and writes to the pool
        wait for both."""
        script, call = EncoderScript(), mixed_step(contexts)
        script.op(call, {1: K, 2: V})
        op, pools = OPS[writer]
        script.op(op(SHORT), pools)
        encoded = script.run()[0]
        assert encoded.events == ["dispatch", "dispatch", "barrier", *events]
        writes = {i for i, role, _ in call["launches"][0]["buffers"] if role in WRITTEN}
        assert writes and all(encoded.bound[0][i] == encoded.bound[1][i] for i in writes)

    @pytest.mark.parametrize("contexts", [[45, 7], [900, 7]])
    def test_what_reads_the_output_of_a_mixed_step_waits_for_it(self, contexts):
        script, call = EncoderScript(), mixed_step(contexts)
        script.op(call, {1: K, 2: V})
        (out,) = (i for i, role, _ in call["launches"][-1]["buffers"] if role == "output")
        script.read(script.run()[0].bound[-1][out], 1)
        assert script.run()[0].events[-2:] == ["barrier", "dispatch"]

    @pytest.mark.parametrize(
        ("name", "where"), [("attention", (1, 2)), ("write", (4, 5)), ("copy", (2, 3))]
    )
    def test_buffers_are_where_the_plan_says(self, name, where):
        op, pools = OPS[name]
        script, call = EncoderScript(), op(SHORT)
        script.op(call, pools)
        (bound,) = script.run()[0].bound
        assert bound.keys() == {index for index, _, _ in call["launches"][0]["buffers"]}
        assert [index for index in bound if bound[index] in (K, V)] == [*where]
        assert [bound[index] for index in where] == [K, V]

    @pytest.mark.parametrize("name", OPS)
    def test_pools_do_not_fill_a_command_buffer(self, name):
        """The pools of the case have 24 576 elements each."""
        op, pools = OPS[name]
        script = EncoderScript()
        script.op(op(SHORT), pools)
        assert min(SHORT.k_cache.size, SHORT.v_cache.size) > 10_000 > script.run()[0].counted

    def test_rows_of_a_pool_do_not_fill_a_command_buffer(self):
        script = EncoderScript()
        script.read(K, 10_000)
        assert script.run()[0].counted == 0


class TestReadsByMLX:
    """Gathers go through the primitive that tells the encoder of the pool."""

    POOL = KVPool([KVShape(2, 8, 4, mx.float32)], 6, 4)
    TABLES = mx.array([[2, 0], [1, 5]])

    @pytest.mark.parametrize("name", ["gather", "gather_blocks", "reference"])
    def test_no_gather_goes_past_it(self, name):
        k, v = self.POOL.k[0], self.POOL.v[0]
        if name == "gather":
            read = self.POOL.gather(0, head_runs(mx.array([2, 0]), 2), 7)
        elif name == "gather_blocks":
            read = _ext.gather_blocks(k, self.TABLES, 7), _ext.gather_blocks(v, self.TABLES, 7)
        else:
            lens = mx.array([7, 3])
            query = mx.zeros((2, 2, 1, 8))
            out = reference_mlx.paged_attention(query, k, v, self.TABLES, lens, scale=1.0)
            read = (out,)
        for array in read:
            assert "PoolRead" in primitives(array) and "Gather" not in primitives(array)

    def test_rows_are_those_of_take(self):
        rows = mx.arange(24).reshape(6, 4)
        for indices in (mx.array([5, 0, 5]), self.TABLES, mx.array(3)):
            assert mx.array_equal(
                _ext.take_from_pool(rows, indices), mx.take(rows, indices, axis=0)
            )


class TestEndOfWork:
    """``end_of_work`` is MLX's ``CommandEncoder::synchronize`` in two halves."""

    SEEN = "commit", "launched", "completed", "handled", "opened", "raised"
    ONE = "opened", "commit", "launched", "completed", "handled"

    def seen(self, script: EncoderScript) -> tuple[str, ...]:
        return tuple(line for line in script.lines() if line in self.SEEN)

    @pytest.mark.parametrize("told", ["opened", "raised"])
    def test_it_waits_for_a_buffer_of_its_own_then_asks_for_the_error(self, told):
        script = EncoderScript()
        if told == "raised":
            script.add("fail")
        script.add("finish")
        assert self.seen(script) == (*self.ONE, told)

    def test_its_buffer_waits_for_the_encoders_of_all_others(self):
        """A command buffer without an encoder may be complete at any time, and one with an encoder
        when those are that it waits for: no fence of the data orders two attentions."""
        script = EncoderScript()
        for _ in range(3):
            script.op(attention(random_case([5])), {})
            script.end()
            script.add("commit")
        script.add("finish")
        lines = script.lines()
        opened = lines.index("opened")
        assert {"0", "1", "2"} <= set(lines[opened + 1].removeprefix("end ").split())
        assert lines[opened + 3] == "commit" and "commit" not in lines[opened + 4 :]

    def test_an_error_that_the_next_end_meets_is_told_to_who_waits_first(self):
        """MLX tells of an error once. A step is launched before the step before is waited for."""
        script = EncoderScript()
        script.add("two_ends")
        seen = self.seen(script)
        assert seen.count("raised") == 1 and seen.count("completed") == 2
        assert "completed" in seen[seen.index("raised") :]

    def test_another_thread_waits_but_cannot_know_of_an_error(self):
        script = EncoderScript()
        script.add("finish_elsewhere")
        assert self.seen(script)[-3:] == ("completed", "handled", "raised")

    def test_buffers_are_counted_once(self):
        case, script = random_case([5]), EncoderScript()
        for _ in range(3):
            script.op(attention(case), {})
            script.op(attention(case), {})
            script.add("commit")
        assert script.lines()[-1] == "buffers 3"
