"""What the methods of block managers cost: this one's, and those of others, measured before."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.prefix_cache import ROOT, chain_hash, token_bytes

BLOCK_SIZE = 16
REPEATS = 15
HASHED_TOKENS = 16_384
ADMITTED_TOKENS = 8192
ROWS = 32  # sequences that get a block each in one step
APPENDED = 8  # such steps in a round
BULK = "allocate in bulk, ns/block"
APPEND = "append a block, ns"
FREE = "free, ns/block"
FREE_CACHED = "free, content kept, ns/block"
HASH = "hash a 16 K prompt, ms"
COLD = "admit an 8 K prompt, cold, us"
HIT = "admit an 8 K prompt, cached, us"

PUBLISHED: dict[str, dict[str, float]] = {
    "vLLM V1": {BULK: 54, APPEND: 316, FREE: 87, HASH: 1.35, COLD: 536, HIT: 418},
    "nano-vllm": {BULK: 145, APPEND: 4149, FREE: 115, HASH: 1.16, HIT: 3569},
}
"""Measured before, on 2 cores of a Zen 5 server, with 512 blocks a sequence; hashes are xxhash.
vLLM's admission gets its prompts hashed, so it does not include the hashes."""


class Manager:
    """A BlockAllocator with blocks of 16 tokens. A sequence is its id and its tokens."""

    def __init__(self, num_blocks: int) -> None:
        self._allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
        self._next_id = 0

    def sequence(self, tokens: list[int]) -> Any:
        """A sequence that the manager does not know yet."""
        self._next_id += 1
        return self._next_id, tokens

    def allocate(self, sequence: Any) -> None:
        """Blocks for all of its tokens, without looking for a cached prefix."""
        self._allocator.admit(sequence[0], len(sequence[1]))

    def admit(self, sequence: Any) -> None:
        """Blocks for all of its tokens, the cached prefix included."""
        self._allocator.admit(sequence[0], len(sequence[1]), sequence[1])

    def append(self, sequences: list[Any], position: int) -> None:
        """Room for one more token in each sequence; all have `position` tokens."""
        self._allocator.append_each([seq_id for seq_id, _ in sequences], [position] * ROWS)

    def offer(self, sequence: Any) -> None:
        """Its tokens are computed: others may share them."""
        self._allocator.register_prefix(sequence[0], sequence[1], len(sequence[1]))

    def free(self, sequence: Any) -> None:
        self._allocator.free(sequence[0])

    def hash(self, tokens: list[int]) -> None:
        """Of each block together with all tokens before it."""
        parent = ROOT
        for start in range(0, len(tokens), BLOCK_SIZE):
            parent = chain_hash(parent, token_bytes(tokens, start, start + BLOCK_SIZE))


def block_costs(blocks: int) -> dict[str, dict[str, float]]:
    """What the manager's methods cost for sequences of `blocks` blocks: medians, by the names of
    :data:`PUBLISHED`."""
    tokens = np.random.default_rng(0).integers(50_000, size=HASHED_TOKENS).tolist()
    rounds = [_round(blocks, tokens) for _ in range(REPEATS)]
    costs = {key: float(f"{median(each[key] for each in rounds):.3g}") for key in rounds[0]}
    return {"mlx_paged": costs}


def _round(blocks: int, tokens: list[int]) -> dict[str, float]:
    manager = Manager(4 * max(blocks, ADMITTED_TOKENS // BLOCK_SIZE, ROWS * APPENDED))
    first, long = (manager.sequence([0] * (blocks * BLOCK_SIZE)) for _ in range(2))
    manager.allocate(first)  # arrays that grow do it now
    manager.free(first)
    costs = {BULK: _ns(manager.allocate, long) / blocks, FREE: _ns(manager.free, long) / blocks}

    costs[APPEND] = _append_ns(manager)
    costs[HASH] = _ns(manager.hash, tokens) / 1e6
    prompt = tokens[:ADMITTED_TOKENS]
    first, second = manager.sequence(prompt), manager.sequence(prompt)
    costs[COLD] = _ns(manager.admit, first) / 1e3
    manager.offer(first)
    costs[FREE_CACHED] = _ns(manager.free, first) / (ADMITTED_TOKENS // BLOCK_SIZE)
    costs[HIT] = _ns(manager.admit, second) / 1e3
    return costs


def _append_ns(manager: Manager) -> float:
    """A block's part of a step in which each of some sequences needs a block."""
    sequences = [manager.sequence([0] * BLOCK_SIZE) for _ in range(ROWS)]
    for sequence in sequences:
        manager.allocate(sequence)
    times: list[float] = []
    for position in range(BLOCK_SIZE, (APPENDED + 1) * BLOCK_SIZE):
        took = _ns(manager.append, sequences, position)
        if position % BLOCK_SIZE == 0:
            times.append(took / ROWS)
    for sequence in sequences:
        manager.free(sequence)
    return median(times)


def _ns(method: Callable[..., object], *args: object) -> float:
    start = time.perf_counter_ns()
    method(*args)
    return float(time.perf_counter_ns() - start)
