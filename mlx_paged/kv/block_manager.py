"""KVBlockManager: sequences of K/V in a pool of blocks, with copy-on-write forks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from tempfile import TemporaryFile

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.arguments import MAX_INT32, integer
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_bytes import bytes_of, read_blocks, write_blocks
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.layer_groups import plan_pool
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.options import KVBits

LayerKV = tuple[mx.array, mx.array]
PrefillForward = Callable[[mx.array, int], Sequence[LayerKV]]


@dataclass(frozen=True, slots=True)
class BlockTableView:
    """A sequence's block table at one moment.

    Attributes:
        block_ids: ``[n]`` int32, physical blocks in logical order.
        ctx_len: tokens that the sequence owns.
    """

    seq_id: int
    block_ids: mx.array
    ctx_len: int


@dataclass(frozen=True, slots=True)
class TailView:
    """The positions just appended to a sequence.

    Attributes:
        start: first of them.
        slots: ``[n_tokens]`` int32, where their K/V goes: ``block * block_size + offset``.
    """

    seq_id: int
    start: int
    slots: mx.array


class KVBlockManager:
    """A pool of K/V blocks and the sequences in it (PagedAttention; Kwon et al. 2023,
    arXiv:2309.06180, sections 4.2 to 4.4).

    Sequences are appended to, forked and freed. K/V is copied only when a sequence writes into a
    block that it shares (copy-on-write). A method raises OutOfBlocksError if there are too few
    blocks, and ValueError for an unknown sequence or an argument out of range. It changes nothing
    then; only :meth:`prefill_into_kv` keeps what it has written.

    All layers share one block table of each sequence, and every sequence keeps all its tokens. The
    pool of an :class:`Engine` is another object, which may have several tables and windows.

    Args:
        n_layers: layers of the model.
        n_kv_heads: KV heads, one number or one for each layer.
        head_dim: head dimension of the keys, one number or one for each layer.
        block_size: token slots in a block.
        max_blocks: blocks in the pool; all together have fewer than 2**31 slots.
        dtype: of K and V: float32, float16 or bfloat16.
        v_head_dim: head dimension of the values; default `head_dim`.
        kv_bits: 8, 6 or 4 to store K and V quantized; see :mod:`mlx_paged.ops.formats`.

    Raises:
        ValueError: a size is no integer or out of range, a list's length is not `n_layers`, the
            dtype is another, or the pool cannot be quantized so.
    """

    spill_directory: str | PathLike[str] | None = None

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        block_size: int,
        max_blocks: int,
        dtype: mx.Dtype = mx.float16,
        v_head_dim: int | Sequence[int] | None = None,
        kv_bits: KVBits = None,
    ) -> None:
        n_layers = integer("KVBlockManager", "n_layers", n_layers, 1)
        block_size = integer("KVBlockManager", "block_size", block_size, 1, MAX_INT32)
        max_blocks = integer("KVBlockManager", "max_blocks", max_blocks, 1, MAX_INT32 // block_size)
        heads = _per_layer("n_kv_heads", n_kv_heads, n_layers)
        k_dims = _per_layer("head_dim", head_dim, n_layers)
        v_dims = k_dims if v_head_dim is None else _per_layer("v_head_dim", v_head_dim, n_layers)
        if dtype not in (mx.float32, mx.float16, mx.bfloat16):
            raise ValueError(
                f"[KVBlockManager] dtype is {dtype}: expected float32, float16 or bfloat16"
            )
        plain = [KVShape(*dims, dtype) for dims in zip(heads, k_dims, v_dims, strict=True)]
        shapes = [shape.quantized("KVBlockManager", kv_bits, rotates=False) for shape in plain]
        plan = self.plan = plan_pool(shapes, [None] * n_layers, block_size)
        self.allocator = BlockAllocator(max_blocks, block_size, plan.groups)
        self.pool = KVPool((), max_blocks, block_size, plan, capacity=max_blocks)
        self._used: dict[int, None] = {}  # sequences in the pool, the latest used last
        self._spilled: dict[int, tuple[int, npt.NDArray[np.uint8] | None]] = {}

    @property
    def k(self) -> list[mx.array]:
        """Keys of each layer, ``[n_kv_heads, max_blocks, block_size, head_dim]``."""
        return self.pool.k

    @property
    def v(self) -> list[mx.array]:
        """Values of each layer, ``[n_kv_heads, max_blocks, block_size, v_head_dim]``."""
        return self.pool.v

    @property
    def scales(self) -> dict[str, list[mx.array]]:
        """Scales of each quantized layer, as further arguments of the attention ops."""
        return self.pool.scales

    # Sequences

    def new_sequence(
        self, seq_id: int, prompt_len: int, tokens: Sequence[int] | None = None
    ) -> BlockTableView:
        """Start a sequence with room for `prompt_len` tokens.

        With `tokens` (the prompt's ids), the sequence reuses a cached prefix: the first
        ``cached_prefix(tokens)`` positions need no prefill.
        """
        seq_id = integer("new_sequence", "seq_id", seq_id)
        prompt_len = integer("new_sequence", "prompt_len", prompt_len, 0)
        self._check_new("new_sequence", seq_id)
        self._copy_blocks(self.allocator.admit(seq_id, prompt_len, tokens).copies)
        return self._view(seq_id)

    def fork(self, parent_seq_id: int, child_seq_id: int) -> BlockTableView:
        """Start a sequence that shares all its parent's blocks, without a copy."""
        child_seq_id = integer("fork", "child_seq_id", child_seq_id)
        self._check_new("fork", child_seq_id)
        self.allocator.fork(parent_seq_id, child_seq_id)
        self._touch(parent_seq_id)
        return self._view(child_seq_id)

    def ensure_tail_capacity(self, seq_id: int, n_tokens: int = 1) -> TailView:
        """Append `n_tokens` positions: copy a shared tail block, add blocks as needed."""
        n_tokens = integer("ensure_tail_capacity", "n_tokens", n_tokens, 1)
        start = self.allocator.num_tokens(seq_id)
        self.make_writable(seq_id, start, start + n_tokens)
        slots = self.allocator.slots(seq_id, start, start + n_tokens)
        return TailView(seq_id, start, as_int32(slots))

    def make_writable(self, seq_id: int, start: int, stop: int) -> None:
        """Let a sequence write positions [start, stop): add blocks, copy shared ones.

        The span must not be empty, nor leave a hole before `start`.
        """
        start = integer("make_writable", "start", start, 0)
        stop = integer("make_writable", "stop", stop, start + 1)
        self._copy_blocks(self.allocator.make_writable(seq_id, start, stop))
        self._touch(seq_id)

    def commit(self, seq_id: int, tokens: Sequence[int], num_computed: int) -> None:
        """Make full blocks reusable: the K/V of ``tokens[:num_computed]`` is written."""
        num_tokens = min(len(tokens), self.allocator.num_tokens(seq_id))
        length = integer("commit", "num_computed", num_computed, 0, num_tokens)
        self.allocator.register_prefix(seq_id, tokens, length)

    def cached_prefix(self, tokens: Sequence[int]) -> int:
        """How many leading tokens a new sequence would find in the prefix cache."""
        return self.allocator.cached_prefix(tokens)

    def free(self, seq_id: int) -> None:
        """End a sequence: release its blocks."""
        if self._spilled.pop(seq_id, None) is None:
            self.allocator.free(seq_id)
            self._used.pop(seq_id, None)

    def table(self, seq_id: int) -> tuple[mx.array, int]:
        """``(block_ids [n] int32, ctx_len)`` of a sequence."""
        view = self._view(seq_id)
        return view.block_ids, view.ctx_len

    def batch_tables(self, seq_ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """``(block_tables [B, max_blocks] int32, context_lens [B] int32)`` for the attention op,
        valid by construction."""
        lens = [self.allocator.num_tokens(seq_id) for seq_id in seq_ids]
        self._touch(*seq_ids)
        rows = self.allocator.table_rows(seq_ids)
        return as_int32(self.allocator.block_tables.rows(rows)), as_int32(lens)

    # Writing

    def write_kv(self, layer_idx: int, k: mx.array, v: mx.array, slot_mapping: mx.array) -> None:
        """Write K/V of one layer at slots ``[T]``, as :func:`mlx_paged.ops.write_kv` takes it."""
        self.pool.write(self._layer("write_kv", layer_idx), k, v, slot_mapping)

    def write_prefill(
        self, seq_id: int, layer_idx: int, k_chunk: mx.array, v_chunk: mx.array, start_pos: int
    ) -> None:
        """Write one layer's K/V of prompt positions ``[start_pos, start_pos + T)``.

        Adds blocks and copies shared ones as needed. RoPE is already applied to the keys.

        Args:
            k_chunk: ``[n_kv_heads, T, head_dim]``, with or without a leading axis of 1.
            v_chunk: ``[n_kv_heads, T, v_head_dim]``, likewise.
            start_pos: at most the number of tokens that the sequence has.
        """
        layer = self._layer("write_prefill", layer_idx)
        shape = self.pool.shapes[layer]
        start_pos = integer("write_prefill", "start_pos", start_pos, 0)
        k_rows = _chunk_rows("k_chunk", k_chunk, shape.n_kv_heads, shape.head_dim, shape.dtype)
        v_rows = _chunk_rows("v_chunk", v_chunk, shape.n_kv_heads, shape.v_head_dim, shape.dtype)
        if k_rows.shape[0] != v_rows.shape[0]:
            raise ValueError(
                f"[write_prefill] k_chunk has {k_rows.shape[0]} tokens but v_chunk "
                f"{v_rows.shape[0]}: expected the same"
            )
        stop = start_pos + k_rows.shape[0]
        self.make_writable(seq_id, start_pos, stop)
        slots = as_int32(self.allocator.slots(seq_id, start_pos, stop))
        self.pool.write(layer, k_rows, v_rows, slots)

    def prefill_into_kv(
        self, seq_id: int, tokens: mx.array, max_chunk_tokens: int, forward: PrefillForward
    ) -> Iterator[range]:
        """Write a prompt in chunks and yield after each (chunked prefill; Agrawal et al. 2024,
        arXiv:2403.02310, section 4.1).

        Args:
            tokens: ``[n]`` prompt token ids.
            max_chunk_tokens: largest number of tokens in a chunk.
            forward: takes a chunk's tokens ``[T]`` and its first position; returns ``(k, v)`` of
                exactly these tokens for each layer, as :meth:`write_prefill` takes them.

        Yields:
            The positions just written. The caller runs its decode steps before the next chunk.
        """
        max_chunk_tokens = integer("prefill_into_kv", "max_chunk_tokens", max_chunk_tokens, 1)
        if tokens.ndim != 1:
            raise ValueError(f"[prefill_into_kv] tokens has shape {tokens.shape}: expected (n,)")
        for start in range(0, tokens.size, max_chunk_tokens):
            chunk = tokens[start : start + max_chunk_tokens]
            num_layers = 0
            for layer, (k, v) in enumerate(forward(chunk, start)):
                if k.shape[-2:-1] != (chunk.size,):
                    raise ValueError(
                        f"[prefill_into_kv] forward returned k of shape {k.shape} for layer "
                        f"{layer}: expected {chunk.size} tokens"
                    )
                self.write_prefill(seq_id, layer, k, v, start)
                num_layers += 1
            if num_layers != self.pool.n_layers:
                raise ValueError(
                    f"[prefill_into_kv] forward returned K/V of {num_layers} layers: expected "
                    f"{self.pool.n_layers}"
                )
            mx.eval(self.pool.handles())
            yield range(start, start + chunk.size)

    # Tiering

    def spill_to_host(self, seq_id: int | None = None) -> int:
        """Move a sequence's K/V to host memory and give up its blocks; returns the sequence. With a
        `spill_directory` it goes to an unnamed file there, or OSError is raised.

        Until :meth:`prefetch` it cannot be read, written or forked; :meth:`free` ends it. Blocks
        that it shares stay with the others.

        Args:
            seq_id: default: the sequence that was used least recently.
        """
        seq_id = next(iter(self._used), None) if seq_id is None else seq_id
        if seq_id is None or seq_id not in self.allocator:
            raise ValueError(f"[spill_to_host] seq_id is {seq_id}: expected a sequence in the pool")
        blocks = self.allocator.table(seq_id).tolist()
        content = self._read(blocks) if blocks else None
        if content is not None and self.spill_directory is not None:
            with TemporaryFile(dir=self.spill_directory) as file:
                file.write(content.data)
                file.flush()
                content = np.memmap(file, np.uint8, "r", shape=content.shape)
        num_tokens = self.allocator.num_tokens(seq_id)
        self.free(seq_id)
        self._spilled[seq_id] = num_tokens, content
        return seq_id

    def prefetch(self, seq_id: int) -> None:
        """Bring a spilled sequence back, into other blocks with the same content."""
        if seq_id not in self._spilled:
            raise ValueError(f"[prefetch] seq_id is {seq_id}: expected a spilled sequence")
        num_tokens, content = self._spilled[seq_id]
        self.allocator.admit(seq_id, num_tokens)
        del self._spilled[seq_id]
        self._touch(seq_id)
        if content is not None:
            write_blocks(self.pool, self.allocator.table(seq_id), 0, content)

    def _read(self, blocks: list[int]) -> npt.NDArray[np.uint8]:
        """A copy of blocks on the host. All work that wrote them has ended without an error."""
        staged = read_blocks(self.pool, blocks, 0)
        if (end := ops.metal.end_of_work()) is not None:
            end()
        return np.array(bytes_of(staged, 0, len(blocks))).reshape(len(blocks), -1)

    def _touch(self, *seq_ids: int) -> None:
        """Note that these sequences were used last."""
        for seq_id in seq_ids:
            self._used.pop(seq_id, None)
            self._used[seq_id] = None

    def _check_new(self, op: str, seq_id: int) -> None:
        if seq_id in self._spilled:
            raise ValueError(f"[{op}] sequence {seq_id} is spilled: expected a new id")
        if seq_id in self.allocator:
            raise ValueError(f"[{op}] sequence {seq_id} is in use: expected a new id")

    @property
    def blocks_in_use(self) -> int:
        return self.allocator.store.blocks_in_use

    @property
    def refcount_histogram(self) -> dict[int, int]:
        """How many blocks have how many references."""
        return self.allocator.store.refcount_histogram()

    @property
    def cow_clones(self) -> int:
        """Blocks copied on write so far."""
        return self.allocator.store.cow_clones

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held and that nothing leaks."""
        self.allocator.check_integrity()

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.pool.copy_blocks(copies)
        self.allocator.store.copies_done()

    def _view(self, seq_id: int) -> BlockTableView:
        block_ids: Int32Array = np.array(self.allocator.table(seq_id))
        self._touch(seq_id)
        return BlockTableView(seq_id, mx.array(block_ids), self.allocator.num_tokens(seq_id))

    def _layer(self, op: str, layer_idx: int) -> int:
        return integer(op, "layer_idx", layer_idx, 0, self.pool.n_layers - 1)


def _per_layer(name: str, value: int | Sequence[int], n_layers: int) -> list[int]:
    values = list(value) if isinstance(value, Iterable) else [value] * n_layers
    if len(values) != n_layers:
        raise ValueError(
            f"[KVBlockManager] {name} is {value}: expected an integer >= 1 or {n_layers} of them"
        )
    return [integer("KVBlockManager", name, each, 1, MAX_INT32) for each in values]


def _chunk_rows(
    name: str, chunk: mx.array, n_kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> mx.array:
    """``[(1,) n_kv_heads, T, head_dim]`` as rows ``[T, n_kv_heads, head_dim]``, a view."""
    heads = chunk[0] if chunk.ndim == 4 and chunk.shape[0] == 1 else chunk
    if heads.ndim != 3 or heads.shape[0] != n_kv_heads or heads.shape[2] != head_dim:
        raise ValueError(
            f"[write_prefill] {name} has shape {chunk.shape}: "
            f"expected ({n_kv_heads}, T, {head_dim})"
        )
    if not isinstance(chunk, mx.array) or chunk.dtype != dtype:
        raise ValueError(
            f"[write_prefill] {name} has type {type(chunk).__name__} and dtype {chunk.dtype}: "
            f"expected array and {dtype}"
        )
    return heads.transpose(1, 0, 2)
