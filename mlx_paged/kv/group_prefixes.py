"""The prefix caches of all layer groups together. Knows no mlx."""

from collections import deque
from collections.abc import Container, Mapping, Sequence

from mlx_paged.kv.block_tables import BlockTables, SequenceBlocks
from mlx_paged.kv.blocks import BlockStore
from mlx_paged.kv.cached_block import FIRST, CachedBlock
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.prefix_cache import (
    ABSENT,
    TOKEN_BYTES,
    chain_hash,
    root_hash,
    smallest_run,
    token_bytes,
)
from mlx_paged.kv.prefix_ends import Checkpoint, KnownBlocks, PrefixEnds
from mlx_paged.kv.prefix_match import MissReason, NeededBlock, PrefixMatch, block_key
from mlx_paged.kv.worth import TOKENS, TextWorth


class GroupPrefixes:
    """Registers the blocks of sequences in the prefix cache of each layer group, and finds them.

    A prefix is reused up to a position at which every group has all blocks that a sequence keeps:
    the blocks of its window, or all blocks if the group has no window.

    Args:
        worth: of the parts of a text.

    Attributes:
        ends: where a prefix may end.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        store: BlockStore,
        tables: BlockTables,
        ends: PrefixEnds,
        worth: TextWorth = TOKENS,
    ) -> None:
        self._groups = groups
        self._store = store
        self._tables = tables
        self._block_size = store.prefixes[0].block_size
        self.ends = ends
        self._worth = worth
        self._worths = list[int]()  # of full blocks, by their index in a text
        # Group, block and hash of each block that was registered; a tier reads them. None: no tier.
        self.fresh: deque[tuple[int, int, bytes]] | None = None

    def match(self, tokens: Sequence[int] | None, num_tokens: int, salt: bytes) -> PrefixMatch:
        """The longest reusable prefix of ``tokens[:num_tokens]``, without the last token. `tokens`
        is None if nothing may be reused."""
        if tokens is None:
            return PrefixMatch([], [[] for _ in self._groups], [], 0, MissReason.DISABLED)
        stop = max(0, min(num_tokens, len(tokens)) - 1)
        known, found = self._full_blocks(tokens, stop, root_hash(salt))
        end, whole = self.ends.latest(known), len(known.hashes) * self._block_size
        count = end.position // self._block_size
        blocks = [
            [block for block in of_group[first:count] if block is not None]
            for of_group, first in zip(found, self._first_kept(count), strict=True)
        ]
        return PrefixMatch(
            known.hashes[:count],
            blocks,
            end.tails,
            end.position,
            end.miss,
            end.checkpoint,
            longer=whole if whole > end.position else 0,
        )

    def count_uses(self, match: PrefixMatch) -> None:
        """Note that a sequence begins with what was found. A block of whose tokens only the first
        ones were found is not used: to begin with a few equal tokens is no continuation."""
        run = TOKEN_BYTES * (match.num_cached % self._block_size)
        for group, prefixes in enumerate(self._store.prefixes):
            for known in match.blocks[group]:
                prefixes.used(known)
            for known in match.tails[group : group + 1]:
                if len(known.tokens) == run:
                    prefixes.used(known)

    def needed(
        self, tokens: Sequence[int], salt: bytes, elsewhere: Container[bytes]
    ) -> list[NeededBlock]:
        """The full blocks, in order, that a prompt could reuse if the pool had the blocks whose
        keys are in `elsewhere`, and what a prefix needs at its end beside blocks. Empty if
        the prompt can reuse as many tokens without these keys."""
        stop, size, root = len(tokens) - 1, self._block_size, root_hash(salt)
        # Of a block that ends with the prompt all tokens before the last one are reused.
        is_last_useful = self.ends.is_within_blocks and size > smallest_run(size)
        known, found = self._full_blocks(tokens, stop + is_last_useful, root, elsewhere)
        if len(known.hashes) * size > stop and not known.is_complete(stop // size):
            known, found = self._full_blocks(tokens, stop, root, elsewhere)
        hashes, of_ends = known.hashes, list[NeededBlock]()
        if not self.ends.is_within_blocks:
            self.ends.shorten(hashes, known, elsewhere)
            if self.match(tokens, len(tokens), salt).num_cached >= len(hashes) * size:
                return []
            last = len(hashes) - 1
            content = token_bytes(tokens, last * size, (last + 1) * size)
            absent = CachedBlock(ABSENT, hashes[-1], known.parent(last), content)
            absent.worth = self._worth.of_states((last + 1) * size)
            of_ends = self.ends.needed_after(last, absent)
        firsts = self._first_kept(min(len(hashes), stop // size))
        return [
            NeededBlock(i, group, block, block_key(key, group))
            for i, key in enumerate(hashes)
            for group, first in enumerate(firsts)
            if i >= first and (block := found[group][i]) is not None
        ] + of_ends

    def _full_blocks(
        self, tokens: Sequence[int], stop: int, root: bytes, elsewhere: Container[bytes] = ()
    ) -> tuple[KnownBlocks, list[list[CachedBlock | None]]]:
        """Finds the full blocks of ``tokens[:stop]`` that every group can reuse, and the blocks of
        each group. A block that the pool lacks counts as found if its key is in `elsewhere`."""
        caches, size, parent = self._store.prefixes, self._block_size, root
        hashes: list[bytes] = []
        found: list[list[CachedBlock | None]] = [[] for _ in caches]
        asks = bool(elsewhere)
        columns = [  # of each group; the last value: whether a missing block ends the search
            (cache, blocks, block_key(b"", index), group.keeps_all)
            for index, (group, cache, blocks) in enumerate(
                zip(self._groups, caches, found, strict=True)
            )
        ]
        is_complete = True
        for start in range(0, stop - size + 1, size):
            content = token_bytes(tokens, start, start + size)
            key = chain_hash(parent, content)
            hashes.append(key)
            for cache, blocks, suffix, is_needed in columns:
                known = cache.find(key, parent, content)
                if known is None:
                    if asks and key + suffix in elsewhere:
                        worth = self._worth_of(start // size)
                        known = CachedBlock(ABSENT, key, parent, content, worth=worth, root=root)
                    elif is_needed:
                        is_complete = False
                blocks.append(known)
            if not is_complete:
                break
            parent = key
        count = len(hashes)
        while (missing := self._missing(found, count)) is not None:
            count = missing
        next_one = hashes[count : count + 1]
        was_evicted = any(cache.was_evicted(key) for key in next_one for cache in caches)

        def has_all(count: int) -> bool:
            return self._missing(found, count) is None

        return KnownBlocks(tokens, stop, root, hashes[:count], was_evicted, has_all), found

    def _missing(self, found: list[list[CachedBlock | None]], count: int) -> int | None:
        """One of the first `count` blocks that a group needs and lacks; None if there is none."""
        for blocks, first in zip(found, self._first_kept(count), strict=True):
            needed = blocks[first:count]
            if not all(needed):
                return first + needed.index(None)
        return None

    def _first_kept(self, count: int) -> list[int]:
        """For each group the first block that a sequence of `count` full blocks keeps."""
        size = self._block_size
        return [group.kept_from(count * size) // size for group in self._groups]

    def register(self, sequence: SequenceBlocks, tokens: Sequence[int], num_computed: int) -> None:
        """Make the sequence's full blocks reusable, whose K/V is in the pool."""
        if not sequence.is_reusable:
            return
        parent, size = sequence.prefix_hash(len(sequence.hashes)), self._block_size
        root, uses = sequence.root, FIRST if sequence.gives_way else 0
        tables = [self._tables.row(sequence.row, group) for group in range(len(self._groups))]
        for i in range(len(sequence.hashes), num_computed // size):
            content = token_bytes(tokens, i * size, (i + 1) * size)
            key = chain_hash(parent, content)
            worth = self._worths[i] if i < len(self._worths) else self._worth_of(i)
            for group, first in enumerate(sequence.first_entries):
                if i >= first:
                    block = int(tables[group][i])
                    self._store.prefixes[group].register(
                        block, parent, content, key, root, uses, worth
                    )
                    if self.fresh is not None:
                        self.fresh.append((group, block, key))
            sequence.hashes.append(key)
            sequence.private_start = max(sequence.private_start, (i + 1) * size)
            parent = key

    def register_tail(
        self, sequence: SequenceBlocks, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Make the sequence's last block reusable, which is not full."""
        last, num_filled = divmod(num_computed, self._block_size)
        if not sequence.is_reusable or num_filled == 0:
            return
        content = token_bytes(tokens, num_computed - num_filled, num_computed)
        for group, prefixes in enumerate(self._store.prefixes):
            block = int(self._tables.row(sequence.row, group)[last])
            parent, uses = sequence.prefix_hash(last), FIRST if sequence.gives_way else 0
            worth = self._worth.of_block(num_computed - num_filled, num_computed)
            prefixes.register(block, parent, content, root=sequence.root, uses=uses, worth=worth)
        sequence.private_stop = 0

    def _worth_of(self, index: int) -> int:
        """What a full block is worth at this place of a text."""
        size, worths = self._block_size, self._worths
        for start in range(len(worths) * size, (index + 1) * size, size):
            worths.append(self._worth.of_block(start, start + size))
        return worths[index]

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Block i is block ``numbers[i]`` from here on; blocks without a number are known no
        more."""
        for prefixes in self._store.prefixes:
            prefixes.renumber(numbers)
        if self.fresh is not None:
            known = [(g, numbers[block], key) for g, block, key in self.fresh if block in numbers]
            self.fresh.clear()
            self.fresh.extend(known)

    def keep(self, sequence: SequenceBlocks, tokens: Sequence[int], checkpoint: Checkpoint) -> bool:
        """Let prefixes end at a checkpoint of the sequence, if its block is known and has none at
        this position. Returns whether the checkpoint is kept."""
        size = self._block_size
        block = (checkpoint.position - 1) // size
        if not sequence.is_reusable or len(sequence.hashes) < block:
            return False
        content = token_bytes(tokens, block * size, checkpoint.position)
        return self.ends.keep(sequence.prefix_hash(block), content, checkpoint)
