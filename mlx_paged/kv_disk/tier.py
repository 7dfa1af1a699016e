"""KVDiskTier: which blocks go to the disk, and which come back. Knows no mlx."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.prefix_cache import TOKEN_BYTES, CachedBlock
from mlx_paged.kv.prefix_match import AbsentBlock, MissReason, PrefixMatch, block_key
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.kv_disk.no_tier import NoTier
from mlx_paged.kv_disk.store import DiskStore, Load
from mlx_paged.request import Request

STEP_BYTES = 1 << 24
"""Bytes that a step with other work copies into the pool at most, and out of it of blocks that are
not evicted. An idle engine copies as many at once, so that a request that arrives does not wait for
more."""
LOAD_BYTES = 1 << 31
"""Bytes of a load at most. What a longer prefix has more is computed."""
WAIT = 0.02
"""Seconds that an engine without other work waits for the disk at once."""
MAX_ASKS = 2
"""A request asks when it arrives, and before it is admitted."""
LOAD_TIMEOUT = 30.0
"""Seconds after which a request no longer waits for the disk."""


@dataclass(slots=True)
class _Plan:
    """What a request waits for.

    Attributes:
        held: blocks before these that the pool has.
        absent: those that are not in the pool yet, in order.
        advances: whether the last step wrote some of them.
    """

    load: Load
    held: list[CachedBlock]
    absent: deque[AbsentBlock]
    advances: bool = False


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

    exists = True

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
        self._is_alone = False  # the requests that wait delay no others
        self._allocator = allocator
        self._seconds_to_compute = seconds_to_compute
        self._entry_bytes = entry_bytes
        self._full = allocator.block_size * TOKEN_BYTES
        self._plans: dict[int, _Plan] = {}  # by id of the request that waits for it
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
            while fresh and num_bytes < STEP_BYTES and self.store.has_room:
                entry = fresh.popleft()
                if known.entry(entry.block) is entry:
                    self._leave(group, entry)
                    num_bytes += self._entry_bytes[group]
        return self.leaving()

    def put(self, copied: list[tuple[bytes, list[Any]]]) -> None:
        self.store.put(copied)

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
        plan = self._plans.get(request.id)
        if plan is not None:
            if plan.advances:
                self.loading[request.id] = request
            return plan.advances
        if self._asked[request.id] >= MAX_ASKS or not len(self.store):
            return False
        self._asked[request.id] += 1
        tokens, salt, store = request.tokens, request.salt, self.store
        held, absent = self._allocator.prefixes.absent(tokens, salt, store)
        if not absent or self._reached.get(request.id, -1) >= absent[0].index:
            return False
        sizes = accumulate(store.size_of(block.key) for block in absent)
        absent = [block for block, size in zip(absent, sizes, strict=True) if size <= LOAD_BYTES]
        keys = [block.key for block in absent]
        size = self._allocator.block_size
        to_compute = self._seconds_to_compute(
            absent[0].index * size, absent[-1].index * size + size
        )
        if 0 < to_compute < store.seconds_to_read(keys):
            self._num_declined += request.id not in self._declined
            self._declined.add(request.id)
            return False
        loads = {plan.load for plan in self._plans.values()}
        load = next((load for load in loads if keys[0] in load.keys), None)
        if load is None and sum(load.num_bytes for load in loads) > LOAD_BYTES:
            self._asked[request.id] -= 1  # others come first
            return False
        load = store.load(keys, to_compute) if load is None else load
        self._plans[request.id] = _Plan(load, held, deque(absent))
        self._reached[request.id] = absent[0].index
        self.loading[request.id] = request
        return True

    def arrived(self, waits: bool) -> list[Request]:
        self._is_alone = waits
        self._leaving.clear()  # what a failed plan left is void
        loads = [(request, self._plans[i].load) for i, request in self.loading.items()]
        if waits and loads:
            futures = [f for _, load in loads for f in load.futures if not f.done()]
            wait(futures, WAIT, FIRST_COMPLETED)
        latest = monotonic() - LOAD_TIMEOUT
        arrived = [request for request, load in loads if load.is_done or load.started < latest]
        for request in arrived:
            del self.loading[request.id]
        return arrived

    def adopt(self, request: Request) -> list[BlockTransfer]:
        plan, store = self._plans.get(request.id), self._allocator.store
        if plan is None or not plan.load.is_done:
            return []
        for known in plan.held:
            store.touch(known)
        plan.held = []
        adopted: list[BlockTransfer] = []
        num_bytes = 0
        limit = LOAD_BYTES if self._is_alone else STEP_BYTES
        while plan.absent and num_bytes < limit:
            block = plan.absent[0]
            if not self._is_usable(block, plan.load):
                plan.absent.clear()
                break
            if block.group is None:
                self._attach(block, plan.load.found[block.key])
            elif not store.prefixes[block.group].find(block.hash, block.parent, block.tokens):
                if store.num_available < self._allocator.groups[block.group].width:
                    break
                adopted.append(self._take(block, plan.load.found[block.key]))
                num_bytes += self._entry_bytes[block.group]
            plan.absent.popleft()
        plan.advances = bool(adopted)
        if not plan.absent:
            self.store.note(plan.load)
            del self._plans[request.id]
        return adopted

    def admitted(self, request: Request, match: PrefixMatch) -> MissReason | None:
        miss = MissReason.ON_DISK if request.id in self._declined else match.miss
        self.forget(request)
        for group, entries in enumerate(match.blocks):
            most = STEP_BYTES // max(1, self._entry_bytes[group])
            for entry in entries:
                if len(self._leaving) < most:
                    self._leave(group, entry)
        return miss

    def forget(self, request: Request) -> None:
        self.loading.pop(request.id, None)
        self._plans.pop(request.id, None)
        self._reached.pop(request.id, None)
        self._asked.pop(request.id, None)
        self._declined.discard(request.id)

    def _is_usable(self, block: AbsentBlock, load: Load) -> bool:
        """Whether a block was read, and has the size that the pool expects."""
        payload = load.found.get(block.key)
        if payload is None or block.group is None:
            return payload is not None
        return len(payload) == self._entry_bytes[block.group]

    def _attach(self, block: AbsentBlock, payload: Any) -> None:
        """Keep the recurrent states after a block."""
        snapshot = Snapshot((block.index + 1) * self._allocator.block_size, states=payload)
        self._allocator.prefixes.attach_at(block.parent, block.tokens, snapshot)

    def _take(self, block: AbsentBlock, payload: Any) -> BlockTransfer:
        """Take an entry for a block. The step that is planned does not evict it: its content is not
        there yet."""
        assert block.group is not None
        store = self._allocator.store
        (entry,) = store.take(1, block.group)
        store.prefixes[block.group].register(entry, block.hash, block.parent, block.tokens)
        store.hold_source(entry)
        store.release([entry])
        return BlockTransfer(block.key, block.group, store.blocks_of(entry), payload)
