"""``python -m mlx_paged.kv_disk DIR``: lists, verifies and trims a directory of stored K/V."""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlx_paged.kv_disk.packs import PackFiles, allow_disk

GB = 10**9


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 if damage was found, or 2 after a mistake."""
    parser = ArgumentParser("mlx_paged.kv_disk", description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="as given to --kv-disk")
    verify = "read every record and remove those that are damaged"
    parser.add_argument("--verify", action="store_true", help=verify)
    trim = "remove the packs unused longest until no more GB are left"
    parser.add_argument("--trim", type=float, metavar="GB", help=trim)
    args = parser.parse_args(argv)
    allow_disk()
    try:
        if not args.directory.is_dir():
            raise ValueError(f"{args.directory}: no such directory")
        packs = PackFiles(args.directory, sys.maxsize)
    except ValueError as error:
        print(f"mlx_paged.kv_disk: error: {error}", file=sys.stderr)
        return 2
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


if __name__ == "__main__":
    sys.exit(main())
