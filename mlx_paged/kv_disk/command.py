"""Lists, verifies and trims a directory of stored K/V."""

import argparse
import sys
from collections import Counter

import numpy as np

from mlx_paged.kv.cached_block import FIRST, CachedBlock
from mlx_paged.kv.known_chains import Chain, chains
from mlx_paged.kv.prefix_cache import ROOT, TOKEN_BYTES
from mlx_paged.kv_disk.packs import PackFiles, Record, allow_disk

GB = 10**9
MOST_CHAINS = 10  # of a model that are listed


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if damage was found. Raises ValueError if the directory does
    not exist or has other files."""
    allow_disk()
    if not args.directory.is_dir():
        raise ValueError(f"DIR {args.directory}: no such directory: expected one of --kv-disk")
    packs = PackFiles(args.directory, sys.maxsize)
    records, damage = dict[bytes, list[Record]](), Counter[str]()
    for found in packs.scan():
        if isinstance(found, str):
            damage[found] += 1
            continue
        size, at = found.location.num_bytes, found.location
        memory = {size: np.empty((1, size), np.uint8)}
        wanted = [(found.key, at, 0)]
        (reason,) = packs.read(wanted, memory, found.identity) if args.verify else [None]
        if reason is not None:
            damage[reason] += 1
            packs.kill(at)
        else:
            records.setdefault(found.identity, []).append(found)
    while args.trim is not None and packs.packs and packs.num_bytes > args.trim * GB:
        packs.remove(packs.first_to_go())
    for model, own in records.items():
        kept = [each for each in own if each.location.pack in packs.packs]
        _show(model.hex()[:12], kept)
    print(f"{len(packs.packs)} packs, {packs.num_bytes / GB:.3f} GB")
    for reason, count in damage.items():
        print(f"damaged ({reason}): {count}")
    packs.close()
    return int(damage.total() > 0)


def _show(model: str, records: list[Record]) -> None:
    """Print what is stored of a model: counts, never tokens."""
    size = sum(record.location.num_bytes for record in records) / GB
    of_background = sum(record.origin.is_background for record in records)
    count, longest = chains_of(records)
    told = f"{of_background} of the background, " if of_background else ""
    print(f"model {model}: {len(records)} records, {told}{size:.3f} GB, {count} chains")
    for chain in longest:
        print(f"  chain of {chain.tokens} tokens, {chain.shared_tokens} of them shared")


def chains_of(records: list[Record]) -> tuple[int, list[Chain]]:
    """How many texts a prompt can go on from, and the longest, of the layer group that has most
    blocks. Texts whose beginning is absent do not count."""
    groups = dict[bytes, list[CachedBlock]]()
    for _, key, _, origin in records:
        if origin.num_tokens:
            parent = origin.parent if any(origin.parent) else ROOT
            content, uses = bytes(TOKEN_BYTES * origin.num_tokens), FIRST * origin.is_background
            root = parent if origin.is_first else ROOT
            block = CachedBlock(0, key[:16], parent, content, uses, root=root)
            groups.setdefault(key[16:], []).append(block)
    blocks = sorted(groups.values(), key=len)[-1] if groups else []
    return chains(blocks, None, MOST_CHAINS)
