"""Whether the books of an allocator are right: no block is lost, and every reference is counted."""

from collections import Counter
from collections.abc import Mapping

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockStore
from mlx_paged.kv.prefix_cache import TOKEN_BYTES, PrefixCache, chain_hash
from mlx_paged.kv.snapshots import Snapshots


def check_integrity(allocator: BlockAllocator) -> None:
    """Assert that every block is free, cached or held, and that every reference is counted."""
    store, tables, held = allocator.store, allocator.block_tables, Counter[int]()
    sequences = allocator._sequences.values()
    for sequence in sequences:
        num_full = allocator.blocks_needed(sequence.num_tokens)
        first_private = sequence.private_start // allocator.block_size
        last_private = allocator.blocks_needed(sequence.private_stop)
        for group, entries in enumerate(allocator._held(sequence)):
            first = sequence.first_entries[group]
            num_missing = num_full - first - len(entries)
            assert num_missing >= 0 and (num_missing == 0 or allocator.groups[group].window)
            assert len(set(entries)) == len(entries), "a sequence holds a block twice"
            for block in entries[max(0, first_private - first) : max(0, last_private - first)]:
                assert store.counts[block] == 1
                assert block not in store.prefixes[group]
            held.update(entries)
        assert len(sequence.hashes) <= sequence.num_tokens // allocator.block_size
    num_rows_taken = len(tables._versions) - len(tables._free_rows)
    assert num_rows_taken == len(sequences), "a table row is lost"
    check_store(store, held)


def check_store(store: BlockStore, held: Mapping[int, int]) -> None:
    """Assert that every block is free, or is part of one entry, which is idle or held; and that
    each entry has as many references as `held` says, 0 where it says nothing."""
    for prefixes in store.prefixes:
        check_prefixes(prefixes)
    for entry, source in store.origins.items():
        assert 0 <= entry < len(store.counts) and store.origins.get(source) == source
    in_use = {entry for entry, count in enumerate(store.counts) if count} | store.origins.keys()
    for entry, count in enumerate(store.counts):
        assert count == held.get(entry, 0), "a reference is not counted"
    assert store.idle.keys().isdisjoint(in_use), "an idle entry is held"
    found = Counter(store.free)
    for entry in [*in_use, *store.idle]:
        found.update(store.blocks_of(entry))
    assert found.keys() == set(range(len(store.counts))), "a block is lost"
    assert found.total() == len(store.counts), "a block is used twice"
    assert store.num_idle == sum(map(store.width_of, store.idle)), "idle blocks are miscounted"
    known = {entry for prefixes in store.prefixes for entry in prefixes.by_block}
    assert known <= in_use | store.idle.keys(), "a free block is still cached"
    assert store.idle.keys() <= known, "an idle entry without known content"
    for group, prefixes in enumerate(store.prefixes):
        are_own = [store._group_of[entry] == group for entry in prefixes.by_block]
        assert all(are_own), "another group's"


def check_prefixes(cache: PrefixCache) -> None:
    """Assert that all indices of a prefix cache hold the same blocks."""
    assert len(cache._by_hash) == len(cache.by_block)
    assert sum(map(len, cache._by_parent.values())) == len(cache.by_block)
    assert all(cache._by_parent.values()), "a prefix without blocks is kept"
    lengths = {}
    for block, entry in cache.by_block.items():
        assert entry.block == block and cache._by_hash[entry.hash] is entry
        assert block in cache._by_parent[entry.parent]
        assert entry.hash == chain_hash(entry.parent, entry.tokens)
        lengths[block], odd_bytes = divmod(len(entry.tokens), TOKEN_BYTES)
        assert cache.min_run <= lengths[block] <= cache.block_size and odd_bytes == 0
    assert len(cache._evicted) <= cache._max_evicted
    assert cache._evicted.keys().isdisjoint(cache._by_hash), "a known block counts as evicted"
    if cache.snapshots is not None:
        check_snapshots(cache.snapshots, lengths, cache.block_size)


def check_snapshots(snapshots: Snapshots, num_tokens: Mapping[int, int], block_size: int) -> None:
    """Assert that every snapshot is in a known block, one of those in `num_tokens`."""
    by_place = snapshots._by_place
    places = {(block, run) for block, runs in snapshots._runs.items() for run in runs}
    assert places == by_place.keys(), "a snapshot is lost, or left behind"
    assert all(snapshots._runs.values()), "a block without snapshots is kept"
    assert len(snapshots) <= snapshots.max_snapshots, "too many snapshots"
    assert len(set(map(id, by_place.values()))) == len(by_place), "one snapshot, two places"
    for (block, run), snapshot in by_place.items():
        assert 0 < run <= num_tokens.get(block, 0), "a snapshot without its block"
        num_before = snapshot.position - run
        assert num_before >= 0 == num_before % block_size, "a snapshot in another's place"
