"""The K/V arrays of each layer, which all sequences share."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.in_place import are_written_in_place, is_copied_in_place
from mlx_paged.kv.layer_groups import ArrayPlan, PoolPlan
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.fallback import in_blocks, origins, row_indices, scattered, with_blocks
from mlx_paged.ops.formats import dequantized, quantized
from mlx_paged.ops.layer_kv import LayerKV

SMALL_ARRAY = 1 << 20
SAME_SIZE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
"""Integers by the bytes of an element. NumPy has no bfloat16."""


def planned_block_bytes(arrays: Sequence[ArrayPlan]) -> int:
    """Bytes of a block in all arrays: arrays that share memory have scales of their own."""
    sizes = {a.memory: a.block_size * (a.shape.token_bytes - a.shape.scale_bytes) for a in arrays}
    return sum(sizes.values()) + sum(a.block_size * a.shape.scale_bytes for a in arrays)


class KVPool:
    """K and V of every layer, each ``[n_kv_heads, num_blocks, block_size, head_dim]``, and the
    scales of quantized ones.

    Where plain MLX writes, a write is a scatter, for which MLX takes the memory of the old array if
    nothing else holds it: no handle is kept, none may be under way when the next one is written,
    and rows without a slot go to one more block, `num_blocks`, which no table names.

    In memory the order is ``[num_blocks, n_kv_heads, block_size, head_dim]``: one head's part of a
    block is contiguous. On a CPU arrays are page-aligned, and Linux is asked for huge pages, whole
    ones inside an array only. ``k[layer]`` and ``v[layer]`` are handles: a write returns new ones
    over the same buffer, and the old ones must not be read again. In latent layers V is a view of
    K. Layers of several layer groups may share one pair of arrays, which counts as one layer here.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        plan: PoolPlan | None = None,
        capacity: int = 0,
        limits: object = None,
    ) -> None:
        """Make the arrays: a pair for each shape, or those of a plan. `limits` outlives them."""
        arrays = [ArrayPlan(shape, block_size, i, {0}) for i, shape in enumerate(shapes)]
        self._arrays = arrays if plan is None else list(plan.arrays)
        self.shapes = tuple(array.shape for array in self._arrays)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # :meth:`grow` copies nothing up to this number of blocks. On a CPU a capacity reserves
        # address space. Blocks take memory when they are written.
        self.capacity = capacity
        self.k: list[mx.array] = []
        self.v: list[mx.array] = []
        is_quantized = any(shape.kv_bits is not None for shape in self.shapes)
        names = ("k_scales", "v_scales") if is_quantized else ()
        # "k_scales" and "v_scales", arguments of the ops; empty if nothing is quantized.
        self.scales: dict[str, list[mx.array]] = {name: [] for name in names}
        # The handles of all layers: keys, values and, if quantized, scales, as the ops read them.
        self.stored = [self.k, self.v, *self.scales.values()]
        # Whether the device writes in place: if not, plain MLX does.
        self.in_place = are_written_in_place(self.shapes, block_size)
        self._spare = 0 if self.in_place else 1
        # Whether it copies blocks in place, too: handles are kept then.
        self.changes_in_place = self.in_place and all(
            map(is_copied_in_place, dict.fromkeys(self.shapes))
        )
        self._make()
        self._first = self._kept()
        self._indices: tuple[mx.array | None, dict[tuple[int, int], mx.array]] = None, {}
        self._limits = limits  # the last attribute

    def _make(self) -> None:
        """Make the arrays, of zeros."""
        owners: dict[int, int] = {}  # the first pair of arrays with each memory
        # For each pair of arrays that one; itself where it shares the memory of no earlier pair.
        self._owners = [
            owners.setdefault(array.memory, i) if self.in_place else i
            for i, array in enumerate(self._arrays)
        ]
        for i, (array, owner) in enumerate(zip(self._arrays, self._owners, strict=True)):
            shape, shared = array.shape, None if owner == i else owner
            k, v = shape.formats
            self.k.append(self._array(array, k.columns(shape.head_dim), k.dtype, self.k, shared))
            if shape.latent:
                self.v.append(_latents(self.k[i], shape))
            else:
                columns = v.columns(shape.v_head_dim)
                self.v.append(self._array(array, columns, v.dtype, self.v, shared))
            for scales, form, dims in zip(
                self.scales.values(), shape.formats, shape.row_dims, strict=False
            ):
                scales.append(self._array(array, form.scale_columns(dims), mx.float16))
        mx.eval(self.stored)

    def _kept(self) -> list[list[mx.array]]:
        """The handles to which :meth:`reset_handles` returns; none where MLX takes their memory."""
        return [list(handles) for handles in self.stored] if self.changes_in_place else []

    def _array(
        self,
        array: ArrayPlan,
        columns: int,
        dtype: mx.Dtype,
        known: Sequence[mx.array] = (),
        shared: int | None = None,
    ) -> mx.array:
        """An array of zeros, or a view of array `shared` of those known."""
        num_blocks = self.num_blocks + self._spare
        shape = (num_blocks, array.shape.n_kv_heads, array.block_size, columns)
        if shared is None:
            return self._zeros(shape, dtype).transpose(1, 0, 2, 3)
        return _view(known[shared], shape)

    def _zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """A new array of the pool."""
        if not self.changes_in_place:
            # MLX's cache may give a buffer that exceeds the array by up to two pages. A scatter
            # never takes the memory of an array whose buffer exceeds it by more than one.
            mx.clear_cache()
        return ops.pool_zeros(shape, dtype, capacity=self.capacity)

    def settle(self, arrays: Sequence[mx.array] = ()) -> None:
        """Compute arrays. Where plain MLX changes the pool, wait until nothing that was evaluated
        holds its arrays: results can be read before the completion handlers have run that hold what
        was read."""
        mx.eval(arrays)
        if not self.changes_in_place:
            mx.synchronize()

    @property
    def n_layers(self) -> int:
        return len(self.shapes)

    @property
    def block_bytes(self) -> int:
        return planned_block_bytes(self._arrays)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def places(self) -> list[tuple[int, int]]:
        """The address and the bytes of each memory that the device writes to in place, on a CPU.
        Computes nothing."""
        sizes: dict[int, int] = {}  # layers may share memory, and latent values are in the keys
        for handles in self._first:
            for handle in handles:
                elements = handle.view(SAME_SIZE[handle.itemsize])
                memory = ops.as_numpy(elements.transpose(1, 0, 2, 3))
                address = memory.__array_interface__["data"][0]
                sizes[address] = max(memory.nbytes, sizes.get(address, 0))
        return list(sizes.items())

    def layer(self, layer: int) -> LayerKV:
        """The arrays that attention of a layer reads."""
        return LayerKV(*[handles[layer] for handles in self.stored])

    def targets(self, layer: int) -> LayerKV:
        """The arrays that rows are written to: those of the layer, or in latent layers two views of
        its keys."""
        shape = self.shapes[layer]
        return LayerKV(*_halves(self.k[layer], shape)) if shape.latent else self.layer(layer)

    def write(self, layer: int, k: mx.array, v: mx.array, slot_mapping: mx.array) -> None:
        """Write K rows and V rows to their slots ``[T]``, in place; :func:`mlx_paged.ops.write_kv`
        has the shapes. In latent layers these are the latents and the rotary keys."""
        if self.shapes[layer].rotates:
            k, v = ops.hadamard(k), ops.hadamard(v)
        if not self.in_place:
            return self._scatter(layer, self._as_stored(layer, k, v), slot_mapping)
        kv = self.targets(layer)
        written = ops.write_kv(k, v, kv.keys, kv.values, slot_mapping, **kv.options)
        in_place = partial(ops.writes_in_place, k, kv.keys, kv.values, slot_mapping)
        self._replace(layer, written, in_place)

    def write_stored(self, layer: int, rows: Sequence[mx.array], slot_mapping: mx.array) -> None:
        """As `write`, with rows of all arrays of :meth:`targets`, which are not rounded again."""
        if not self.in_place:
            stored = rows
            if self.shapes[layer].latent:
                stored = [mx.concatenate(list(rows), axis=-1)]
            return self._scatter(layer, stored, slot_mapping)
        k, v, *scales = self.targets(layer).arrays
        written = ops.write_kv(rows[0], rows[1], k, v, slot_mapping)
        more = _pair(ops.write_kv, *rows[2:], *scales, slot_mapping)
        self._replace(
            layer, written + more, lambda: ops.writes_in_place(rows[0], k, v, slot_mapping)
        )

    def _as_stored(self, layer: int, k: mx.array, v: mx.array) -> list[mx.array]:
        """Rows of K and V as the layer's arrays hold them: one array of latents, or K, V and the
        scales of both."""
        if self.shapes[layer].latent:
            return [mx.concatenate([k, v], axis=-1)]
        if not self.scales:
            return [k, v]
        pairs = zip((k, v), self.shapes[layer].formats, strict=True)
        (k, of_k), (v, of_v) = (quantized(rows, form) for rows, form in pairs)
        return [k, v, of_k, of_v]

    def _scatter(self, layer: int, rows: Sequence[mx.array], slot_mapping: mx.array) -> None:
        """Write rows of the layer's arrays by plain MLX."""
        heads, block_size = self.shapes[layer].n_kv_heads, self._arrays[layer].block_size
        if self._indices[0] is not slot_mapping:
            self._indices = slot_mapping, {}
        known = self._indices[1]
        indices = known.get((heads, block_size))
        if indices is None:
            indices = row_indices(slot_mapping, heads, self.num_blocks, block_size)
            known[heads, block_size] = indices
        for handles, of_array in zip(self.stored, rows, strict=False):
            written = scattered(handles[layer], of_array, indices)
            if handles is self.k:
                self.set_keys(layer, written)
            else:
                handles[layer] = written

    def writes_in_place(self, layer: int, k: mx.array, slot_mapping: mx.array) -> bool:
        """Whether the device writes rows like `k` in place."""
        if not self.in_place:
            return False
        caches = self.k[layer], self.v[layer]
        return ops.writes_in_place(k, *caches, slot_mapping, bool(self.scales))

    def _replace(
        self, layer: int, written: tuple[mx.array, ...], is_in_place: Callable[[], bool]
    ) -> None:
        """Take the handles that an op has returned, which edits in place or not."""
        shape = self.shapes[layer]
        if not shape.latent:
            for handles, handle in zip(self.stored, written, strict=True):
                handles[layer] = handle
        elif is_in_place():
            self.set_keys(layer, mx.depends([self.k[layer]], list(written))[0])
        else:
            self.set_keys(layer, mx.concatenate(list(written), axis=-1))

    def set_keys(self, layer: int, handle: mx.array) -> None:
        """Replace the handle of a layer's keys by another one over the same buffer."""
        self.k[layer] = handle
        if self.shapes[layer].latent:
            self.v[layer] = _latents(handle, self.shapes[layer])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, in place; the handles change as in a write."""
        uploaded: dict[frozenset[int], mx.array] = {}  # by groups: most arrays have the same
        for layer, array in enumerate(self._arrays):
            groups = frozenset(array.groups)
            if groups not in uploaded:
                pairs = [(copy.src, copy.dst) for copy in copies if copy.group in groups]
                # Not a result of an op: a GPU's launch depends on the values.
                uploaded[groups] = mx.array(np.array(pairs, np.int32).reshape(-1, 2))
            if uploaded[groups].size and not self.changes_in_place:
                self._copy_plainly(layer, uploaded[groups])
            elif uploaded[groups].size:
                k, v, *scales = self.targets(layer).arrays
                copied = ops.copy_blocks(k, v, uploaded[groups])
                more = _pair(ops.copy_blocks, *scales, uploaded[groups])
                in_place = partial(ops.copies_in_place, k, v, uploaded[groups])
                self._replace(layer, copied + more, in_place)

    def _copy_plainly(self, layer: int, pairs: mx.array) -> None:
        """Copy blocks by plain MLX: first out of the arrays, and then into them."""
        sources, destinations = origins(pairs)
        of_layer = [
            handles
            for handles in self.stored
            if not (handles is self.v and self.shapes[layer].latent)
        ]
        found = [mx.take(in_blocks(handles[layer]), sources, axis=0) for handles in of_layer]
        self.settle(found)
        for handles, content in zip(of_layer, found, strict=True):
            written = with_blocks(handles[layer], destinations, content)
            if handles is self.k:
                self.set_keys(layer, written)
            else:
                handles[layer] = written

    def read(
        self,
        layer: int,
        gather: Callable[[mx.array], mx.array],
        *,
        as_written: bool = False,
        as_stored: bool = False,
    ) -> tuple[mx.array, mx.array]:
        """A layer's K and V that `gather` takes from an array, in the type of the model; if
        `as_written`, of latent layers the latents and the rotary keys; if `as_stored`, of layers
        that rotate the Hadamard transforms."""
        shape = self.shapes[layer]
        if shape.latent:
            keys = gather(self.k[layer])
            return _halves(keys, shape) if as_written else (keys, _latents(keys, shape))
        if not self.scales:
            return gather(self.k[layer]), gather(self.v[layer])
        k, v, of_k, of_v = map(gather, self.layer(layer).arrays)
        k, v = dequantized(k, of_k, shape.dtype), dequantized(v, of_v, shape.dtype)
        if as_stored or not shape.rotates:
            return k, v
        return ops.hadamard(k), ops.hadamard(v)

    def gather(
        self, layer: int, tables: mx.array, num_tokens: int, runs: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """K and V as they are stored, ``[B, n_kv_heads, num_tokens, head_dim]`` each.

        Args:
            tables: ``[B, M]``, block tables.
            runs: ``[B, n_kv_heads, M]``, where each head's part of each block is; None: not known.
        """
        return self.read(
            layer, lambda a: ops.gather_blocks(a, tables, num_tokens, runs), as_stored=True
        )

    def grow(self, num_blocks: int) -> None:
        """Add blocks of zeros until there are `num_blocks`; the first ones keep their content.
        Beyond the capacity, and on a GPU, this copies the arrays."""
        assert num_blocks >= self.num_blocks

        def longer(blocks: mx.array) -> mx.array:
            mx.async_eval(blocks)  # type: ignore[no-untyped-call]
            if self._spare:
                return self._with_room(blocks[: self.num_blocks], num_blocks)
            grown = ops.grown_in_place(blocks, num_blocks)
            return self._with_room(blocks, num_blocks) if grown is None else grown

        self._replace_arrays(longer, num_blocks)

    def keep(self, block_ids: Int32Array, num_blocks: int) -> None:
        """Move these blocks to new arrays, as the first of `num_blocks`, and give up the others."""
        kept = mx.array(block_ids)
        self._replace_arrays(
            lambda blocks: self._with_room(mx.take(blocks, kept, axis=0), num_blocks), num_blocks
        )

    def renew(self, num_blocks: int) -> None:
        """Make all arrays anew, of zeros, after a change of their size has failed."""
        self._first = []
        for handles in self.stored:
            handles.clear()
        self.num_blocks = num_blocks
        self._make()
        self._first = self._kept()
        self._indices = None, {}

    def _replace_arrays(self, change: Callable[[mx.array], mx.array], num_blocks: int) -> None:
        """Replace each array, ``[num_blocks, n_kv_heads, block_size, head_dim]``, by what `change`
        makes of it. Large arrays are replaced layer by layer: old and new arrays of only one layer
        exist together. If memory runs out, the layer keeps its old arrays."""

        def changed(cache: mx.array) -> mx.array:
            new = change(cache.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
            _evaluate(new)
            return new

        self._first = []  # otherwise they would keep the old arrays alive
        sharers = [i for i, owner in enumerate(self._owners) if owner != i]
        if sharers:  # what they have written is in the memory of others
            mx.eval(self.stored)
        for layer, shape in enumerate(self.shapes):
            if layer in sharers:
                continue
            if shape.latent:
                self.set_keys(layer, changed(self.k[layer]))
            else:
                arrays = [changed(handles[layer]) for handles in self.stored]  # all, or none
                for handles, array in zip(self.stored, arrays, strict=True):
                    handles[layer] = array
            _evaluate(self.v[layer])
            for other in [i for i in sharers if self._owners[i] == layer]:
                self._share(other, layer, num_blocks, changed)
        self.num_blocks = num_blocks
        self._first = self._kept()
        self._indices = None, {}

    def _share(
        self, layer: int, owner: int, num_blocks: int, changed: Callable[[mx.array], mx.array]
    ) -> None:
        """Let a layer's arrays be views of new ones; its scales are its own."""
        for handles in self.stored[:2]:
            heads, _, *rest = handles[layer].shape
            handles[layer] = _view(handles[owner], (num_blocks, heads, *rest))
        for handles in self.scales.values():
            handles[layer] = changed(handles[layer])
        mx.eval([handles[layer] for handles in self.stored])

    def _with_room(self, blocks: mx.array, num_blocks: int) -> mx.array:
        """A copy of the blocks, with zeros after them up to `num_blocks`."""
        shape = num_blocks + self._spare, *blocks.shape[1:]
        longer = self._zeros(shape, blocks.dtype)
        longer[: blocks.shape[0]] = blocks
        return longer

    def arrays_of(self, group: int) -> list[tuple[list[mx.array], int]]:
        """The arrays that hold blocks of a layer group, each as a list of handles and an index of
        this list. Empty arrays and views of other arrays are left out."""
        return [
            (handles, layer)
            for handles in self.stored
            for layer, array in enumerate(self._arrays)
            if group in array.groups and handles[layer].size
            if not (handles is self.v and array.shape.latent)
        ]

    def reset_handles(self) -> None:
        """Discard writes that were never evaluated. The content of their slots is then unknown.
        Where plain MLX changes the arrays, all are made again."""
        if not self.changes_in_place:
            for handles in self.stored:
                handles.clear()
            self._indices = None, {}
            self._make()
            return
        for handles, first in zip(self.stored, self._first, strict=True):
            handles[:] = first

    def replace_handles(self, handles: Iterable[mx.array]) -> None:
        """Replace all handles by others over the same buffers, in the order of :meth:`handles`."""
        given = iter(handles)
        for of_layers in self.stored:
            of_layers[:] = islice(given, len(of_layers))

    def handles(self) -> list[mx.array]:
        """Every layer's newest handles. Evaluate them once a step: this bounds the graph."""
        return list(chain.from_iterable(self.stored))


def _evaluate(*arrays: mx.array) -> None:
    """Evaluate arrays: wait for large ones, and queue small ones, which is faster."""
    evaluate = mx.eval if arrays[0].nbytes > SMALL_ARRAY else mx.async_eval
    evaluate(*arrays)


def _view(cache: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The memory of an array of the pool as blocks ``[num_blocks, n_kv_heads, block_size, dim]`` of
    another form."""
    return cache.transpose(1, 0, 2, 3).reshape(shape).transpose(1, 0, 2, 3)


def _latents(keys: mx.array, shape: KVShape) -> mx.array:
    """The values of a latent layer, a view of its keys."""
    return keys[..., : shape.v_head_dim]


def _halves(keys: mx.array, shape: KVShape) -> tuple[mx.array, mx.array]:
    """The latents and the rotary keys of a latent layer, views of its keys."""
    latents, rotary_keys = mx.split(keys, [shape.v_head_dim], axis=-1)
    return latents, rotary_keys


def _pair(op: Callable[..., Any], *arrays: mx.array) -> tuple[mx.array, ...]:
    """The op of two scales; of no scales, nothing."""
    written: tuple[mx.array, ...] = op(*arrays) if len(arrays) > 1 else ()
    return written


def as_int32(values: Sequence[int] | Int32Array) -> mx.array:
    return mx.array(np.asarray(values, np.int32))
