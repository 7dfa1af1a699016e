"""Which K/V stays in the pool: tokens that an engine computes a second time.

Fixed traces run on the real scheduler and allocator with a runner that computes nothing. All
figures are counts: no clock and no random number that differs from run to run.

    python -m bench.retention --traces agents tenants
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from bench.command import print_result, table, text_of
from bench.flags.retention import parse
from bench.retention.bound import bound_with_places, clairvoyant_bound
from bench.retention.lru import LeastRecentlyUsed
from bench.retention.replay import BLOCK_SIZE, Counts, Replay
from bench.retention.traces import TRACES, Trace
from bench.retention.works import WORKS
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.eviction import EvictionOrder, WorthOrder
from mlx_paged.kv.worth import KIB, TOKENS, TextWorth, Work

ORDERS: dict[str, Callable[[int], EvictionOrder]] = {"lru": LeastRecentlyUsed, "ours": WorthOrder}
"""What is compared, by name."""


def replayed(
    trace: Trace, make_order: Callable[[int], EvictionOrder], work: Work = TOKENS.work
) -> Counts:
    worth = TextWorth(work, KIB)
    allocator = BlockAllocator(trace.pool_blocks, BLOCK_SIZE, make_order=make_order, worth=worth)
    counts = Replay(trace, allocator, work).run()
    allocator.check_integrity()
    return counts


def measure(trace: Trace, work: Work = TOKENS.work) -> dict[str, Any]:
    """The counts of one trace in each order.

    - `again`: tokens that were computed a second time, `bound` at least; `with_places` at least if
      each request has its blocks in the pool.
    - `operations`: those of the tokens that were computed a second time.
    - `over_bound`: all computed tokens, over the least that the bound says; `best_over_bound`: that
      of `with_places`.
    - `watched_again`: of the watched part, tokens computed a second time over prompt tokens.
    - `first`: of each of its requests, the tokens that its first token waited for.
    """
    bound, best = clairvoyant_bound(trace), bound_with_places(trace)
    row: dict[str, Any] = {"bound": bound, "with_places": best}
    for name, make_order in ORDERS.items():
        counts = replayed(trace, make_order, work)
        again = counts.again.total()
        once = counts.computed.total() - again
        found: dict[str, Any] = {
            "again": again,
            "operations": counts.operations,
            "over_bound": round((once + again) / (once + bound), 3),
        }
        row["best_over_bound"] = round((once + best) / (once + bound), 3)
        if trace.watched:
            prompts = counts.prompts[trace.watched]
            found["watched_again"] = round(counts.again[trace.watched] / prompts, 4)
            found["first"] = counts.first
        row |= {"prompt_tokens": counts.prompts.total(), name: found}
    return row


def cells(name: str, row: dict[str, Any]) -> list[str]:
    lru, ours = row["lru"], row["ours"]
    return [
        name,
        *(f"{count:,}" for count in (row["prompt_tokens"], lru["again"], ours["again"])),
        *(f"{each['operations']:.3g}" for each in (lru, ours)),
        *(f"{row[key]:,}" for key in ("with_places", "bound")),
        *(f"{each:.3f}" for each in (lru["over_bound"], ours["over_bound"])),
        f"{row['best_over_bound']:.3f}",
        *(text_of(each.get("watched_again"), ".2%") for each in (lru, ours)),
        *(text_of(each.get("first") and median(each["first"]), ".0f") for each in (lru, ours)),
    ]


HEAD = [
    "trace",
    "prompt tokens",
    *("again, LRU", "ours", "operations again, LRU", "ours", "best", "bound"),
    *("computed / bound, LRU", "ours", "best"),
    *("chat again, LRU", "ours"),
    *("before a chat's first token, LRU", "ours"),
]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    work = WORKS[args.model]
    rows = {name: measure(TRACES[name](args.seed), work) for name in args.traces}
    print(table([HEAD, *(cells(name, row) for name, row in rows.items())]))
    print_result("retention", {"traces": rows})


if __name__ == "__main__":
    main()
