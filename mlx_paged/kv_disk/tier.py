"""KVDiskTier: which blocks go to the disk, and which come back. Knows no mlx."""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, wait
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any

from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.cached_block import FIRST, CachedBlock
from mlx_paged.kv.prefix_cache import ABSENT, TOKEN_BYTES
from mlx_paged.kv.prefix_match import NeededBlock, PrefixMatch, block_key
from mlx_paged.kv_disk.packs import Origin
from mlx_paged.kv_disk.store import STAGING, DiskStore, Load
from mlx_paged.request import Request

STEP_BYTES = 1 << 24
"""Bytes that a step with other work copies into the pool at most. An idle engine copies as many out
of it at once, so that a request that arrives does not wait for more."""
IDLE_BYTES = 1 << 28
"""Bytes that a step without other work copies into the pool at most."""
LEAVING_BYTES = 1 << 26
"""Bytes that a step copies out of the pool at most, one block more. Other blocks are lost."""
EARLY_BYTES = 1 << 20
"""Bytes that a step copies out of blocks whose memory is not needed yet. Later steps then have
fewer blocks to copy at once."""
NEARLY_FULL = 8
"""A pool is nearly full if less than 1/8 of its blocks is free. Blocks then leave early."""
LOAD_BYTES = 1 << 31
"""Bytes of a load at most. The rest of a longer prefix is computed."""
WAIT = 0.02
"""Seconds that an engine without other work waits for the disk at once."""
LOAD_TIMEOUT = 30.0
"""Seconds after which a request no longer waits for the disk."""
ON_DISK = "on_disk"
"""Why a prompt shares no more, beside the reasons of :class:`MissReason`: more is on the disk, but
to read it would take longer than to compute it."""
DECLINED = 1 << 62
"""Stands for the first block that a request asked for, where to read its blocks takes too long: no
block has so high an index, so the request does not ask again."""


@dataclass(slots=True)
class _Awaited:
    """What a request waits for: blocks that the pool has, and those that it lacks, in order."""

    load: Load
    held: list[NeededBlock]
    absent: deque[NeededBlock]
    seconds_to_compute: float


class KVDiskTier:
    """Copies full blocks from an allocator's pool to a store, and finds them there for new prompts.

    A block is copied when it is used a second time, when the pool is nearly full, when its memory
    is about to get other content, or when the engine is idle. A step copies it into memory of its
    own, which threads of the store write. A prompt whose next blocks are stored waits until they
    are read, unless it takes longer to read them than to compute them.

    Content that was never used is worth as much as the first block of a text. No block is worth
    less, so that a text is written from its beginning on, or not at all.

    Args:
        seconds_to_compute: predicts the time of a prompt's tokens ``[start, stop)``; 0: unknown.
        entry_bytes: of an entry of each layer group.

    Attributes:
        loading: requests by id that wait for the disk, outside the queue.
        leaving: what the step being planned has to copy before it writes anything, by its key.
    """

    def __init__(
        self,
        store: DiskStore,
        allocator: BlockAllocator,
        seconds_to_compute: Callable[[int, int], float],
        entry_bytes: Sequence[int],
    ) -> None:
        self.store = store
        self.loading: dict[int, Request] = {}
        self._allocator = allocator
        self._seconds_to_compute = seconds_to_compute
        self._entry_bytes = entry_bytes
        self._limit = STEP_BYTES  # bytes that the step being planned copies into the pool at most
        self._awaited: dict[int, _Awaited] = {}  # by id of the waiting request
        self._asked: dict[int, int] = {}  # by request id: the first block that it asked for
        self.leaving: dict[bytes, BlockTransfer] = {}
        self._leaving_bytes = 0
        self._coming: set[int] = set()  # entries that the step being planned fills
        self._coming_states: set[int] = set()  # ids of states that the step being planned loads
        allocator.store.on_evict = self._leave
        store.set_least(allocator.worth.of_block(0, allocator.block_size))
        self._fresh = allocator.prefixes.fresh = deque(maxlen=2 * allocator.num_blocks)

    # From the pool to the store

    def copies_when_idle(self) -> list[BlockTransfer]:
        """Blocks to copy now, while no step is under way."""
        self._begin()
        if not self.store.has_room:
            self.store.flush(WAIT)
        self._leave_early(STEP_BYTES)
        return list(self.leaving.values())

    def has_more(self) -> bool:
        """Whether an idle engine should copy more."""
        return self.store.is_writable and bool(self._fresh)

    def put(self, copied: Sequence[BlockTransfer]) -> None:
        """Keep what a step has copied."""
        for each in copied:
            try:
                self.store.put(each.key, each.payload(), each.note)
            except (MemoryError, RuntimeError):  # of a copy only: its step was read without error
                self.store.dropped["copy"] += 1

    def metrics(self) -> dict[str, Any]:
        """Counters as plain JSON values: see docs/metrics.md."""
        levels = {"records": len(self.store), "loading": len(self.loading)}
        return self.store.counts | {"dropped": dict(self.store.dropped)} | levels

    def holdings(self) -> list[Holding]:
        """The memory of what is on its way to the disk and back."""
        loads = {awaited.load for awaited in self._awaited.values()}
        read = sum(load.num_bytes for load in loads if load.num_bytes > STEP_BYTES)
        return [
            Holding("disk_staging", STEP_BYTES, STEP_BYTES, CountedBy.MLX),  # of short loads
            Holding("disk_reads", read, LOAD_BYTES, CountedBy.HEAP),
            Holding("disk_writes", self.store.staged_bytes, STAGING, CountedBy.MLX),
        ]

    def close(self) -> None:
        """Give up the disk. What was given to :meth:`put` is written before."""
        self._allocator.store.on_evict = self._allocator.prefixes.fresh = None
        self.store.close()

    def _begin(self) -> None:
        """Forget what the step before had to copy: another one is planned from here on."""
        self.leaving.clear()
        self._leaving_bytes = 0
        self._coming.clear()
        self._coming_states.clear()

    def _leave_early(self, num_bytes: int) -> None:
        """Let the next step copy blocks that were registered since, up to `num_bytes` in all."""
        while self._fresh and self._leaving_bytes < num_bytes and self.store.has_room:
            group, block, key = self._fresh.popleft()
            known = self._allocator.store.prefixes[group].by_block.get(block)
            if known is not None and known.hash == key:
                self._leave(group, known)

    def _leave(self, group: int, known: CachedBlock) -> None:
        """Let the next step copy a block and the states after it, unless they are stored already,
        or that step fills the block."""
        size = self._allocator.block_size
        if len(known.tokens) < size * TOKEN_BYTES or not self.store.has_room:
            return
        if known.block in self._coming or self._leaving_bytes >= LEAVING_BYTES:
            return
        key, gives_way = block_key(known.hash, group), known.uses == FIRST
        is_used = known.uses > 0
        if key not in self.store and key not in self.leaving:
            blocks = self._allocator.store.blocks_of(known.block)
            origin = Origin(
                parent=known.parent or bytes(16),
                num_tokens=size,
                is_first=known.parent == known.root,
                is_background=gives_way,
                is_used=is_used,
                worth=known.worth if is_used else 0,
            )
            self.leaving[key] = BlockTransfer(key, group, blocks, note=origin)
            self._leaving_bytes += self._entry_bytes[group]
        beside = self._allocator.leaving(known)
        if beside is None or beside.state in self._coming_states or beside.key in self.store:
            return
        is_used = beside.worth > 0
        beside.note = Origin(is_background=gives_way, is_used=is_used, worth=beside.worth)
        self.leaving[beside.key] = beside

    # From the store to the pool

    def ask(self, request: Request) -> bool:
        """Start to read what the pool lacks of a prompt; whether the request has to wait for it."""
        store, size = self.store, self._allocator.block_size
        if not store or self._asked.get(request.id) == DECLINED:
            return False
        needed = self._allocator.prefixes.needed(request.reusable, request.root, store)
        absent = [each for each in needed if each.known.block == ABSENT]
        totals = list(accumulate(store.size_of(each.key) for each in absent))
        absent = absent[: bisect(totals, LOAD_BYTES)]
        if not absent or self._asked.get(request.id, -1) >= absent[0].index:
            return False
        to_compute = self._seconds_to_compute(absent[0].index * size, (absent[-1].index + 1) * size)
        if 0 < to_compute < store.seconds_to_read(totals[len(absent) - 1]):
            self._asked[request.id] = DECLINED
            store.doubt()
            store.counts["slower"] += 1
            return False
        loads = {awaited.load for awaited in self._awaited.values()}
        load = next((load for load in loads if absent[0].key in load.keys), None)
        if load is None:
            if sum(load.num_bytes for load in loads) > LOAD_BYTES:
                return False  # others come first; it asks again
            load = store.load(
                [each.key for each in absent], {each.key: each.known.worth for each in absent}
            )
        held = [each for each in needed if each.known.block != ABSENT]
        self._awaited[request.id] = _Awaited(load, held, deque(absent), to_compute)
        self._asked[request.id] = absent[0].index
        self.loading[request.id] = request
        return True

    def arrived(self, waits: bool) -> list[Request]:
        """The requests that need not wait any more. From here on a step is planned. With `waits`
        there is nothing else to compute: this call then waits a short time for the disk."""
        self._limit = IDLE_BYTES if waits else STEP_BYTES
        self._begin()
        if NEARLY_FULL * len(self._allocator.store.free) < self._allocator.num_blocks:
            self._leave_early(EARLY_BYTES)
        loads = [(request, self._awaited[i].load) for i, request in self.loading.items()]
        if waits and loads:
            futures = [f for _, load in loads for f in load.futures if not f.done()]
            wait(futures, WAIT, FIRST_COMPLETED if len(loads) > 1 else ALL_COMPLETED)
        latest = monotonic() - LOAD_TIMEOUT
        arrived = [request for request, load in loads if load.is_done or load.started < latest]
        for request in arrived:
            del self.loading[request.id]
            if not self._awaited[request.id].load.is_done:
                del self._awaited[request.id]
        return arrived

    def delays(self, request: Request, loads: list[BlockTransfer]) -> bool:
        """Add what was read for a request to the prefix cache, and to `loads`, which the step
        writes before all else. Returns whether the request has to wait for more, in the queue or in
        `loading`. While the pool has too few free blocks, what was read is kept."""
        awaited = self._awaited.get(request.id)
        if awaited is None:
            return self.ask(request)
        adopted = self._adopt(awaited)
        loads += adopted
        if awaited.absent:
            return bool(adopted)
        self.store.note(awaited.load, awaited.seconds_to_compute if awaited.load.found else 0.0)
        del self._awaited[request.id]
        return False

    def admitted(self, request: Request, match: PrefixMatch) -> str | None:
        """A request shares what was found; returns why it found no more."""
        declined = self._asked.get(request.id) == DECLINED
        self.forget(request)
        for group, entries in enumerate(match.blocks):
            for known in entries:
                if self._leaving_bytes < EARLY_BYTES:
                    self._leave(group, known)
        return ON_DISK if declined else match.miss

    def forget(self, request: Request) -> None:
        """The request was admitted, or has ended."""
        self.loading.pop(request.id, None)
        self._awaited.pop(request.id, None)
        self._asked.pop(request.id, None)

    def _adopt(self, awaited: _Awaited) -> list[BlockTransfer]:
        """Take entries of the pool for the blocks that were read. The step being planned does not
        evict these entries: their content is not in the pool yet."""
        store = self._allocator.store
        # The blocks that the request has found become the last to be evicted; only the new blocks
        # are evicted after them.
        for each in awaited.held:
            if each.find(store.prefixes) is each.known:
                store.retain([each.known.block])
                store.release([each.known.block])
        awaited.held = []
        adopted, taken, num_bytes = list[BlockTransfer](), list[int](), 0
        try:
            while awaited.absent and num_bytes < self._limit:
                each = awaited.absent[0]
                group, known, payload = each.group, each.known, awaited.load.found.get(each.key)
                if payload is None:
                    awaited.absent.clear()
                    break
                if each.is_state:
                    transfer = self._allocator.adopt(each, payload)
                    if transfer is not None:
                        adopted.append(transfer)
                        self._coming_states.add(transfer.state)
                elif each.find(store.prefixes) is None:
                    if store.num_available < self._allocator.groups[group].width:
                        break
                    (entry,) = store.take(1, group)
                    taken.append(entry)
                    store.prefixes[group].register(
                        entry,
                        known.parent,
                        known.tokens,
                        known.hash,
                        known.root,
                        worth=known.worth,
                    )
                    store.hold_source(entry)
                    adopted.append(BlockTransfer(each.key, group, store.blocks_of(entry), payload))
                    num_bytes += self._entry_bytes[group]
                awaited.absent.popleft()
        finally:
            self._coming.update(taken)
            store.release(taken)
        return adopted
