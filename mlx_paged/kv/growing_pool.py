"""K/V arrays that grow."""

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.kv.pool import KVPool


class GrowingPool(KVPool):
    """A :class:`KVPool` to which blocks can be added, at the price of copying it once."""

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks`, the first ones with the content they have now.

        One array is moved at a time, so that no more than one is held twice.
        """
        assert num_blocks >= self.num_blocks
        self._first_k, self._first_v = [], []  # they would keep what is given up
        for arrays in (self.k, self.v):
            for layer in range(self.n_layers):
                arrays[layer] = _longer(arrays[layer], num_blocks - self.num_blocks)
                mx.eval(arrays[layer])
        self.num_blocks = num_blocks
        self._first_k, self._first_v = list(self.k), list(self.v)


def _longer(cache: mx.array, more: int) -> mx.array:
    """``[n_kv_heads, num_blocks, block_size, head_dim]`` with `more` blocks of zeros behind, in the
    pool's order. In that order it is one run of memory, which is copied as such."""
    blocks = cache.transpose(1, 0, 2, 3)
    num_blocks, *block = blocks.shape
    longer = ops.pool_zeros((num_blocks + more, *block), cache.dtype)
    longer[:num_blocks] = blocks
    return longer.transpose(1, 0, 2, 3)
