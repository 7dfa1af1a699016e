"""Lists, verifies and trims a directory of stored K/V."""

import argparse
import sys
from collections import Counter

import numpy as np

from mlx_paged.kv_disk.packs import PackFiles, allow_disk

GB = 10**9


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if damage was found. Raises ValueError if the directory does
    not exist or has other files."""
    allow_disk()
    if not args.directory.is_dir():
        raise ValueError(f"{args.directory}: no such directory")
    packs = PackFiles(args.directory, sys.maxsize)
    records, sizes, damage = Counter[str](), Counter[str](), Counter[str]()
    for found in packs.scan():
        if isinstance(found, str):
            damage[found] += 1
            continue
        identity, key, location = found
        memory = {location.num_bytes: np.empty((1, location.num_bytes), np.uint8)}
        (reason,) = packs.read([(key, location, 0)], memory, identity) if args.verify else [None]
        if reason is not None:
            damage[reason] += 1
            packs.kill(location)
        else:
            records[identity.hex()[:12]] += 1
            sizes[identity.hex()[:12]] += location.num_bytes
    while args.trim is not None and packs.packs and packs.num_bytes > args.trim * GB:
        packs.remove(next(iter(packs.packs)))
    for model, count in records.items():
        print(f"model {model}: {count} records, {sizes[model] / GB:.3f} GB")
    print(f"{len(packs.packs)} packs, {packs.num_bytes / GB:.3f} GB")
    for reason, count in damage.items():
        print(f"damaged ({reason}): {count}")
    packs.close()
    return int(damage.total() > 0)
