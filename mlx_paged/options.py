"""Values that options may have. Knows no mlx, so that a command shows its help at once."""

from enum import StrEnum

from mlx_paged.arguments import shown

KVBits = int | str | None
KV_BITS = (8, 6, 4)
"""Values of ``kv_bits`` beside None, each with a storage format in :mod:`mlx_paged.ops.formats`."""

BLOCK_SIZE = 16
"""Token slots in a block, where a caller does not say."""

MAX_DRAFTS = 15
"""The largest number of drafts of a request in a step. With the request's newest token, 16 rows of
one sequence are attended together."""


class Policy(StrEnum):
    """The order in which waiting requests are admitted."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # lower numbers first, then by arrival
    SHORTEST = "shortest"  # shorter prompts first; waiting makes a prompt count as shorter


class PreemptionPolicy(StrEnum):
    """Which running request is preempted. It is computed again later, with the same result."""

    NEWEST = "newest"  # the last to arrive: repeats the fewest steps, and no request starves
    LONGEST = "longest"  # the most tokens in the pool: causes the fewest preemptions
    FEWEST_GENERATED = "fewest-generated"  # delays the request with the least visible progress


def checked_bits(where: str, kv_bits: KVBits) -> int | None:
    """`kv_bits` as one of :data:`KV_BITS`, or None. Raises ValueError if there is no such
    format."""
    if kv_bits is None or (type(kv_bits) is int and kv_bits in KV_BITS):
        return kv_bits
    name = kv_bits.replace(" ", "") if isinstance(kv_bits, str) else ""
    if name in ("8,8", *map(str, KV_BITS)):
        return int(name[0])
    raise ValueError(
        f"[{where}] kv_bits is {shown(kv_bits)}: expected 8, 6 or 4. Other numbers of bits"
        " change the output more than these: docs/kv-quantization.md"
    )
