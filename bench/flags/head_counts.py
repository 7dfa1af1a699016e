"""Numbers of heads and types of elements, as arguments name them."""

import argparse
import re
from dataclasses import dataclass

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Query heads, KV heads, head dimension; written as "32:8:128"."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> "HeadCounts":
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*):([1-9]\d*)", text)
        if found is None or int(found[1]) % int(found[2]):
            raise argparse.ArgumentTypeError(
                "expected query heads, KV heads that divide them and dim, as 32:8:128, got"
                f" {text!r}"
            )
        return cls(*map(int, found.groups()))

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        return f"{self.num_heads}:{self.num_kv_heads}:{self.head_dim}"
