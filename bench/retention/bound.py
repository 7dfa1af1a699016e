"""How few tokens a pool could compute a second time if its owner knew the future."""

from heapq import heappop, heappush
from itertools import chain

from bench.retention.replay import BLOCK_SIZE
from bench.retention.traces import Ask, Trace

NEVER = 1 << 62


def clairvoyant_bound(trace: Trace) -> int:
    """Tokens of blocks that Belady's rule computes a second time: a block goes whose next use is
    furthest away (Belady 1966, IBM Systems Journal 5(2), MIN). A bound and no policy: a block may
    stay without the blocks before it, a request needs its blocks one after the other, and a block
    may be used without a place in the pool. Blocks that are not full are free."""
    texts = _block_numbers(trace.asks)
    uses = [number for blocks in texts for number in blocks]
    next_use = [NEVER] * len(uses)
    latest: dict[int, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        next_use[i] = latest.get(uses[i], NEVER)
        latest[uses[i]] = i
    kept: dict[int, int] = {}  # by block: its next use
    heap: list[tuple[int, int]] = []  # minus the next use, and the block
    seen, again = set[int](), 0
    for i, number in enumerate(uses):
        again += number in seen and number not in kept
        seen.add(number)
        kept[number] = next_use[i]
        heappush(heap, (-next_use[i], number))
        while len(kept) > trace.pool_blocks:
            use, furthest = heappop(heap)
            if kept.get(furthest) == -use:
                del kept[furthest]
    return BLOCK_SIZE * again


def bound_with_places(trace: Trace) -> int:
    """The fewest tokens of blocks that any order of eviction computes a second time, if requests
    run one after the other and each has all its blocks in the pool when it ends. Blocks that are
    not full are free.

    At each request the pool has to hold the request's blocks, and those that wait for their next
    use fill the rest. To give up those whose next use is furthest away is the best choice, as each
    block costs the same. An order that evicts texts from their ends can do so: the blocks before a
    block are never used later than the block.
    """
    texts = _block_numbers(trace.asks)
    next_uses: list[list[int]] = []
    latest: dict[int, int] = {}
    for i in range(len(texts) - 1, -1, -1):
        next_uses.append([latest.get(number, NEVER) for number in texts[i]])
        latest.update(dict.fromkeys(texts[i], i))
    next_uses.reverse()
    kept: dict[int, int] = {}  # by block: its next use
    heap: list[tuple[int, int]] = []  # minus the next use, and the block
    seen, again = set[int](), 0
    for blocks, uses in zip(texts, next_uses, strict=True):
        again += sum(number in seen and number not in kept for number in blocks)
        seen.update(blocks)
        for number in blocks:
            kept.pop(number, None)
        while kept and len(kept) + len(blocks) > trace.pool_blocks:
            use, furthest = heappop(heap)
            if kept.get(furthest) == -use:
                del kept[furthest]
        for number, use in zip(blocks, uses, strict=True):
            kept[number] = use
            heappush(heap, (-use, number))
    return BLOCK_SIZE * again


def _block_numbers(asks: list[Ask]) -> list[list[int]]:
    """The full blocks that each request needs, as numbers of their content and of all before."""
    numbers: dict[tuple[object, ...], int] = {}
    texts = []
    for ask in asks:
        tokens = list(chain(ask.prompt_tokens, ask.answer_tokens))[:-1]
        parent: object = ask.salt
        blocks = []
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            # Two texts with the same first token in a block and the same parent may differ later.
            key = (parent, *tokens[start : start + BLOCK_SIZE])
            parent = numbers.setdefault(key, len(numbers))
            blocks.append(parent)
        texts.append(blocks)
    return texts
