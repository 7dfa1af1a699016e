"""Agents in turns, whose contexts the pool cannot hold, with K/V on a disk and without.

    python -m scripts.kv_disk_turns [--rounds 3] [--requests 128] [--share 0.25] [--fresh]

The requests of bench's preset agent-turns run two at a time, beside two streams that run all the
time. In pairs, new engines answer them with a disk and without; the next pair begins with the other
one. The tokens must be equal. With --fresh every request has a salt of its own: nothing is found
again, so both engines compute the same, and the disk is written all the time. Printed are the
prompt tokens computed, the bytes written beside those of the unique full blocks of prompts and
answers (headers apart), and percentiles of the streams' steps. The last line is one JSON object:
the pairs' p99, the medians, and the median ratio.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.command import print_result
from bench.flags.presets import AGENTS, PRESETS
from bench.models import llama_model
from bench.names import SIZES
from bench.pairs import in_turns, ratio
from bench.serving.trace import Job
from bench.serving.workload import make_jobs
from mlx_paged import Engine
from mlx_paged.cli import COUNT, FRACTION, Parser
from mlx_paged.kv_disk.packs import HEADER

BLOCK = 16
AT_ONCE, STREAMS = 2, 2
STREAM_TOKENS = 2048

Played = tuple[list[list[int]], dict[str, Any]]
"""All tokens, and what was measured."""


def num_blocks_of(jobs: Sequence[Job], share: float) -> int:
    """Blocks for this share of all contexts at their ends, and for what runs."""
    lengths = [job.kv_tokens for job in jobs]
    running = AT_ONCE * max(lengths) + STREAMS * STREAM_TOKENS
    return int(share * sum(lengths[-AGENTS:]) + running) // BLOCK


def play(jobs: Sequence[Job], num_blocks: int, is_fresh: bool, directory: Path | None) -> Played:
    """The requests on a new engine, with K/V on a disk in `directory` or without."""
    engine = Engine(llama_model(), block_size=BLOCK, num_blocks=num_blocks, kv_disk=directory)

    def add_stream(seed: int) -> int:
        return engine.add_request([seed + 1] * 8, max_tokens=STREAM_TOKENS - 8, ignore_eos=True)

    streams = [add_stream(seed) for seed in range(STREAMS)]
    texts = list[list[int]]()  # prompts and answers of all requests, without the last tokens
    waiting, running, done = list(enumerate(jobs)), dict[int, int](), dict[int, list[int]]()
    gaps, last, started = list[float](), time.perf_counter(), time.perf_counter()
    computed = time.process_time()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            index, job = waiting.pop(0)
            options: dict[str, Any] = {"max_tokens": job.max_tokens, "ignore_eos": True}
            options["cache_salt"] = str(index) if is_fresh else ""
            running[engine.add_request(list(job.prompt), **options)] = index
        outputs = engine.step()
        now = time.perf_counter()
        if any(output.request_id in streams for output in outputs):
            gaps.append(1000 * (now - last))
            last = now
        for output in outputs:
            if output.completion is None:
                continue
            if output.request_id in running:
                index = running.pop(output.request_id)
                done[index] = output.completion.tokens
                texts.append([*jobs[index].prompt, *output.completion.tokens[:-1]])
            else:
                seed = streams.index(output.request_id)
                texts.append([seed + 1] * 8 + output.completion.tokens[:-1])
                streams.append(add_stream(len(streams)))
    wall, computed = time.perf_counter() - started, time.process_time() - computed
    for seed, request_id in enumerate(streams):
        stopped = engine.abort(request_id)
        if stopped is not None:
            texts.append([seed + 1] * 8 + stopped.tokens[:-1])
    tier = engine.scheduler.tier
    engine.close()
    metrics = engine.metrics()
    disk = tier.metrics()
    measured = {
        "prompt_tokens_computed": metrics["prompt_tokens"],
        "wall_s": wall,
        "cpu_s": computed,
        "step_ms": np.percentile(gaps, [50, 90, 99]).round(2).tolist(),
        "kv_disk": disk,
    }
    if disk is not None and not is_fresh:
        prompts = [list(job.prompt) for job in jobs]
        for name, of in (("prompt_bytes", prompts), ("bytes", texts)):
            full = {tuple(t[:n]) for t in of for n in range(BLOCK, len(t) + 1, BLOCK)}
            measured[f"unique_{name}"] = metrics["block_bytes"] * len(full)
        measured["header_bytes"] = HEADER.size * disk["records"]
    return [done[index] for index in sorted(done)], measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("kv_disk_turns", description="Agents in turns with and without a disk.")
    parser.add_argument("--requests", type=COUNT, default=128, metavar="N")
    parser.add_argument("--rounds", type=COUNT, default=3, metavar="N")
    share = "of all contexts that the pool holds"
    parser.add_argument("--share", type=FRACTION, default=0.25, metavar="S", help=share)
    fresh = "nothing is found again: the disk is only written"
    parser.add_argument("--fresh", action="store_true", help=fresh)
    args = parser.parse_args(argv)
    vocab_size = SIZES["reference"]["vocab_size"]
    jobs = make_jobs(PRESETS["agent-turns"], vocab_size, 0, requests=args.requests)
    num_blocks = num_blocks_of(jobs, args.share)

    def without_disk() -> Played:
        return play(jobs, num_blocks, args.fresh, None)

    def on_disk() -> Played:
        with tempfile.TemporaryDirectory(prefix="kv_disk") as directory:
            return play(jobs, num_blocks, args.fresh, Path(directory))

    courses = {"without": without_disk, "with": on_disk}
    runs = in_turns(courses, args.rounds, title="rounds")
    p99: dict[str, list[float]] = {name: [] for name in courses}
    for (expected, without), (tokens, with_disk) in zip(*runs.values(), strict=True):
        assert tokens == expected, "other tokens with the disk"
        print(json.dumps({"without": without, "with": with_disk}), flush=True)
        p99["without"].append(without["step_ms"][2])
        p99["with"].append(with_disk["step_ms"][2])
    result = {
        "pairs_p99_ms": list(zip(p99["without"], p99["with"], strict=True)),
        "p99_ms": {name: median(values) for name, values in p99.items()},
        "ratio": round(ratio(p99["with"], p99["without"]).median, 3),
    }
    print_result("kv_disk_turns", {"load": os.getloadavg()[0], **vars(args), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
