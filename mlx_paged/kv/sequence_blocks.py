"""What an allocator keeps of a sequence. Knows no mlx."""

from dataclasses import dataclass, field

from mlx_paged.kv.prefix_cache import ROOT


@dataclass(slots=True)
class SequenceBlocks:
    """A sequence and the state of its blocks, whose ids are in a row of the block tables.

    Attributes:
        num_tokens: positions ``[0, num_tokens)`` belong to the sequence.
        hashes: of its full blocks offered for reuse.
        root: its first block's parent.
        may_offer: whether its K/V may be offered for reuse.
        first_block: those before it were given up: no position will read them again.
        private_start: positions ``[private_start, private_stop)`` may be written as they are.
    """

    row: int
    num_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)
    root: bytes = ROOT
    may_offer: bool = True
    first_block: int = 0
    private_start: int = 0
    private_stop: int = 0
