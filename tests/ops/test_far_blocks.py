"""Offsets have 64 bits: a block may begin 2**31 bytes or elements behind the first one."""

import subprocess
import sys
from pathlib import Path

import pytest

import mlx_paged

FAR_POOL = f"""
import sys
import types

import mlx.core as mx

package = sys.modules["mlx_paged"] = types.ModuleType("mlx_paged")  # imports nothing else
package.__path__ = [{str(Path(mlx_paged.__file__).parent)!r}]

from mlx_paged import ops

mx.set_default_device(mx.cpu)
DIM = 64


def far_pool(far):
    '''A bfloat16 pool of two blocks of two slots, and its memory. The second block is `far`
    elements behind the first one; only its second slot is memory, at element DIM.'''
    memory = mx.zeros((2 * DIM,), mx.bfloat16)
    mx.eval(memory)
    pool = mx.as_strided(memory, (1, 2, 2, DIM), (DIM, far, DIM - far, 1), 0)
    mx.eval(pool)
    return pool, memory


row = mx.arange(DIM).astype(mx.bfloat16)
for far in (2**30, 2**31):  # 2**31 bytes, 2**31 elements
    (k, k_memory), (v, v_memory) = far_pool(far), far_pool(far)
"""
WRITE = """
    mx.eval(ops.write_kv(row[None, None], row[None, None], k, v, mx.array([3], mx.int32)))
    assert mx.array_equal(k_memory[DIM:], row) and mx.array_equal(v_memory[DIM:], row)
"""
READ = """
    k_memory[DIM:], v_memory[DIM:] = row, row
    k = mx.as_strided(k_memory, k.shape, (DIM, far, DIM - far, 1), 0)
    v = mx.as_strided(v_memory, v.shape, (DIM, far, DIM - far, 1), 0)
    q, table, context = mx.zeros((1, 1, 1, DIM), mx.bfloat16), mx.array([[1]]), mx.array([2])
    out = ops.paged_attention(q, [k], [v], table, context, 0, scale=1.0, window=1)
    assert mx.array_equal(out.flatten(), row)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use", [WRITE, READ], ids=["write_kv", "paged_attention"])
def test_a_far_block_of_a_pool_on_a_cpu(use):
    # In a process of its own, which a wrong offset ends.
    subprocess.run([sys.executable, "-c", FAR_POOL + use], check=True)
