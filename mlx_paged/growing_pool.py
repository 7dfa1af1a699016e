"""K/V arrays that grow."""

import mlx.core as mx

from mlx_paged.kv_pool import KVPool


class GrowingPool(KVPool):
    """A :class:`KVPool` to which blocks can be added, at the price of copying it once."""

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks`, the first ones with the content they have now.

        One array is moved at a time, so that no more than one is held twice.
        """
        assert num_blocks >= self.num_blocks
        added = KVPool(self.shapes, num_blocks - self.num_blocks, self.block_size)
        for arrays, more in ((self.k, added.k), (self.v, added.v)):
            for layer in range(self.n_layers):
                longer = _joined(arrays[layer], more[layer])
                mx.eval(longer)
                arrays[layer] = longer
        self.num_blocks = num_blocks
        self._first_k, self._first_v = list(self.k), list(self.v)


def _joined(cache: mx.array, more: mx.array) -> mx.array:
    """Blocks of both, ``[n_kv_heads, num_blocks, block_size, head_dim]``, in the pool's order."""
    blocks = [array.transpose(1, 0, 2, 3) for array in (cache, more)]
    return mx.concatenate(blocks, axis=0).transpose(1, 0, 2, 3)
