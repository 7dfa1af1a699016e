"""KVDiskTier: which blocks go to the disk, and which come back. Knows no mlx."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import accumulate
from time import monotonic
from typing import Any

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockTransfer, OutOfBlocksError
from mlx_paged.kv.prefix_cache import TOKEN_BYTES, CachedBlock
from mlx_paged.kv.prefix_match import MissReason, PrefixMatch, block_key
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.kv_disk.no_tier import NoTier
from mlx_paged.kv_disk.store import DiskStore, Load
from mlx_paged.request import Request

IDLE_BYTES = 1 << 24
"""Bytes that an idle engine copies at once, so that a request that arrives does not wait for more.
A step copies no more of the blocks that were used a second time."""
LOAD_BYTES = 1 << 30
"""Bytes of a load at most. A longer prefix takes several."""
WAIT = 0.02
"""Seconds that an engine without other work waits for the disk at once."""
MAX_ASKS = 2
"""A request asks when it arrives, and before it is admitted; and again after each load that did not
bring all."""
LOAD_TIMEOUT = 30.0
"""Seconds after which a request no longer waits for the disk."""


class KVDiskTier(NoTier):
    """Copies full blocks from an allocator's pool to a store, and finds them there for new prompts.

    A block is copied when it is used a second time, when its memory is about to get other content,
    or when the engine is idle. A step copies it into memory of its own, which threads of the store
    write. A prompt whose next blocks are stored waits until they are read, unless it takes longer
    to read them than to compute them.

    Args:
        seconds_to_compute: predicts the time of a prompt's tokens ``[start, stop)``; 0: unknown.
        entry_bytes: of an entry of each layer group.

    """

    def __init__(
        self,
        store: DiskStore,
        allocator: BlockAllocator,
        seconds_to_compute: Callable[[int, int], float],
        entry_bytes: Sequence[int],
    ) -> None:
        super().__init__()
        self.store = store
        self._declined: set[int] = set()  # ids of requests whose blocks take too long to read
        self._num_declined = 0
        self._allocator = allocator
        self._seconds_to_compute = seconds_to_compute
        self._entry_bytes = entry_bytes
        self._full = allocator.block_size * TOKEN_BYTES
        self._loads: dict[int, Load] = {}  # by id of the request that waits for it
        self._reached: dict[int, int] = {}  # by request id: the first block of its last load
        self._asked: Counter[int] = Counter()  # by request id
        self._leaving: dict[bytes, BlockTransfer] = {}  # the step that is planned copies them
        self._fresh = [deque[CachedBlock](maxlen=allocator.num_blocks) for _ in allocator.groups]
        allocator.store.on_evict = self._leave
        for prefixes, fresh in zip(allocator.store.prefixes, self._fresh, strict=True):
            prefixes.fresh = fresh

    # From the pool to the store

    def leaving(self) -> list[BlockTransfer]:
        leaving, self._leaving = self._leaving, {}
        return list(leaving.values())

    def has_more(self) -> bool:
        return self.store.is_writable and any(self._fresh)

    def copies_when_idle(self) -> list[BlockTransfer]:
        self._leaving.clear()
        num_bytes = 0
        if not self.store.has_room:
            self.store.flush(WAIT)
        for group, fresh in enumerate(self._fresh):
            known = self._allocator.store.prefixes[group]
            while fresh and num_bytes < IDLE_BYTES and self.store.has_room:
                entry = fresh.popleft()
                if known.entry(entry.block) is entry:
                    self._leave(group, entry)
                    num_bytes += self._entry_bytes[group]
        return self.leaving()

    def put(self, key: bytes, parts: list[Any]) -> None:
        self.store.put(key, parts)

    def metrics(self) -> dict[str, Any]:
        return self.store.metrics() | {"loading": len(self.loading), "slower": self._num_declined}

    def close(self) -> None:
        self._allocator.store.on_evict = None
        for prefixes in self._allocator.store.prefixes:
            prefixes.fresh = None
        self.store.close()

    def _leave(self, group: int, entry: CachedBlock) -> None:
        """Copy a block with the next step, and the states after it, unless they are stored."""
        if len(entry.tokens) < self._full or not self.store.has_room:
            return
        key = block_key(entry.hash, group)
        if key not in self.store:
            blocks = self._allocator.store.blocks_of(entry.block)
            self._leaving[key] = BlockTransfer(key, group, blocks)
        snapshots = self._allocator.snapshots
        key = block_key(entry.hash, None)
        if snapshots is not None and key not in self.store:
            run = self._allocator.block_size
            if snapshots.longest(entry.block, run) == run:
                states = snapshots.use(entry.block, run).states
                self._leaving[key] = BlockTransfer(key, group, (), states)

    # From the store to the pool

    def ask(self, request: Request) -> bool:
        is_enough = self._asked[request.id] >= MAX_ASKS or request.id in self._loads
        if is_enough or not len(self.store):
            return False
        self._asked[request.id] += 1
        absent = self._allocator.prefixes.absent(request.tokens, request.salt, self.store)[1]
        if not absent or self._reached.get(request.id, -1) >= absent[0].index:
            return False
        sizes = accumulate(self.store.size_of(block.key) for block in absent)
        keys = [b.key for b, size in zip(absent, sizes, strict=True) if size <= LOAD_BYTES]
        size = self._allocator.block_size
        start, stop = absent[0].index * size, (absent[len(keys) - 1].index + 1) * size
        to_compute = self._seconds_to_compute(start, stop)
        if 0 < to_compute < self.store.seconds_to_read(keys):
            self._num_declined += request.id not in self._declined
            self._declined.add(request.id)
            return False
        under_way = [load for load in self._loads.values() if keys[0] in load.keys]
        if not under_way and sum(load.num_bytes for load in self._loads.values()) > LOAD_BYTES:
            self._asked[request.id] -= 1  # others come first
            return False
        load = under_way[0] if under_way else self.store.load(keys, to_compute)
        load.is_whole = not under_way and len(keys) == len(absent)
        self._loads[request.id], self._reached[request.id] = load, absent[0].index
        self.loading[request.id] = request
        return True

    def arrived(self, waits: bool) -> list[Request]:
        self._leaving.clear()  # what a failed plan left is void
        futures = [f for i in self.loading for f in self._loads[i].futures]
        if waits and futures:
            wait([f for f in futures if not f.done()], WAIT, FIRST_COMPLETED)
        latest = monotonic() - LOAD_TIMEOUT
        loads = [(request, self._loads[i]) for i, request in self.loading.items()]
        arrived = [request for request, load in loads if load.is_done or load.started < latest]
        for request in arrived:
            del self.loading[request.id]
        return arrived

    def admitted(self, request: Request, match: PrefixMatch) -> MissReason | None:
        miss = MissReason.ON_DISK if request.id in self._declined else match.miss
        self.forget(request)
        for group, entries in enumerate(match.blocks):
            most = IDLE_BYTES // max(1, self._entry_bytes[group])
            for entry in entries:
                if len(self._leaving) < most:
                    self._leave(group, entry)
        return miss

    def adopt(self, request: Request) -> list[BlockTransfer]:
        load = self._loads.get(request.id)
        if load is None or not load.is_done:
            return []
        try:
            adopted = self._adopt(request, load.found)
        except OutOfBlocksError:
            return []
        self.store.note(load)
        del self._loads[request.id]
        is_whole = load.is_whole and len(load.found) == len(load.keys)
        self._asked[request.id] = MAX_ASKS if is_whole else MAX_ASKS - 1
        return adopted

    def forget(self, request: Request) -> None:
        self.loading.pop(request.id, None)
        self._loads.pop(request.id, None)
        self._reached.pop(request.id, None)
        self._asked.pop(request.id, None)
        self._declined.discard(request.id)

    def _adopt(self, request: Request, found: Mapping[bytes, Any]) -> list[BlockTransfer]:
        """Take entries for all blocks, or raise OutOfBlocksError. The step that is planned evicts
        none of them, nor those before them."""
        prefixes, store = self._allocator.prefixes, self._allocator.store
        held, absent = prefixes.absent(request.tokens, request.salt, found)
        groups = [block.group for block in absent if block.group is not None]
        idle = sum(store.width_of(b.block) for b in held if b.block in store.idle)
        needed = sum(self._allocator.groups[group].width for group in groups)
        store.require(needed, store.num_available - idle)
        for known in held:
            store.hold_source(known.block)
        adopted: list[BlockTransfer] = []
        for block in absent:
            if block.group is None:
                position = (block.index + 1) * self._allocator.block_size
                snapshot = Snapshot(position, states=found[block.key])
                prefixes.attach_at(block.parent, block.tokens, snapshot)
                continue
            (entry,) = store.take(1, block.group)
            store.prefixes[block.group].register(entry, block.hash, block.parent, block.tokens)
            store.hold_source(entry)
            store.release([entry])
            content = store.blocks_of(entry), found[block.key]
            adopted.append(BlockTransfer(block.key, block.group, *content))
        return adopted
