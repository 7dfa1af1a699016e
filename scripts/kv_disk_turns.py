"""Agents in turns, whose contexts the pool cannot hold, with K/V on a disk and without.

    python -m scripts.kv_disk_turns [--rounds 3] [--requests 128] [--share 0.25]

The workload: 16 agents in turns; each turn adds 256 to 511 tokens to the agent's context and takes
16 to 32 tokens of output. Two requests run at a time, beside two streams that run all the time. In
turns, new engines answer it with a disk and without. The tokens must be equal. Printed are the
prompt tokens computed, the bytes written beside the unique ones, and percentiles of the streams'
steps.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.models import llama_model
from bench.serving.trace import Job, Trace
from mlx_paged import Engine
from mlx_paged.cli import COUNT, FRACTION, Parser

BLOCK = 16
AT_ONCE, STREAMS = 2, 2
CONTEXTS, VOCAB = 16, 2048


def make_turns(requests: int) -> Trace:
    """Each prompt begins with the agent's last one."""
    rng = np.random.default_rng(0)
    before: list[tuple[int, ...]] = [()] * CONTEXTS
    jobs = []
    for i in range(requests):
        more = rng.integers(VOCAB, size=rng.integers(256, 512)).tolist()
        before[i % CONTEXTS] = (*before[i % CONTEXTS], *more)
        jobs.append(Job(0.0, before[i % CONTEXTS], int(rng.integers(16, 33)), 1))
    return tuple(jobs)


def num_blocks_of(trace: Trace, share: float) -> int:
    """Blocks for this share of all contexts at their ends, and for what runs."""
    lengths = [len(job.prompt) + job.max_tokens for job in trace]
    last = sum(lengths[-CONTEXTS:])
    return int(share * last + AT_ONCE * max(lengths) + STREAMS * 2048) // BLOCK


def play(
    trace: Trace, num_blocks: int, directory: Path | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """All tokens, and what was measured."""
    engine = Engine(llama_model(), block_size=BLOCK, num_blocks=num_blocks, kv_disk=directory)
    streams = [engine.add_request([s + 1] * 8, max_tokens=10**5 // BLOCK) for s in range(STREAMS)]
    jobs, running, done = list(enumerate(trace)), dict[int, int](), dict[int, list[int]]()
    gaps, last, started = list[float](), time.perf_counter(), time.perf_counter()
    while jobs or running:
        while jobs and len(running) < AT_ONCE:
            index, job = jobs.pop(0)
            options: dict[str, Any] = {"max_tokens": job.max_tokens, "ignore_eos": True}
            running[engine.add_request(list(job.prompt), **options)] = index
        outputs = engine.step()
        now = time.perf_counter()
        if outputs:
            gaps.append(1000 * (now - last))
            last = now
        for output in outputs:
            if output.completion is not None and output.request_id in running:
                done[running.pop(output.request_id)] = output.completion.tokens
            elif output.completion is not None:
                streams.append(engine.add_request([1] * 8, max_tokens=10**5 // BLOCK))
    wall = time.perf_counter() - started
    for request_id in streams:
        engine.abort(request_id)
    metrics = engine.metrics()
    disk = metrics["kv_disk"]
    engine.close()
    measured = {
        "prompt_tokens_computed": metrics["prompt_tokens"],
        "wall_s": wall,
        "step_ms": np.percentile(gaps, [50, 90, 99]).round(2).tolist(),
        "kv_disk": disk,
    }
    if disk is not None:
        block = metrics["block_bytes"]
        full = {tuple(j.prompt[:n]) for j in trace for n in range(BLOCK, len(j.prompt) + 1, BLOCK)}
        measured["unique_prompt_bytes"] = block * len(full)
    return [done[index] for index in sorted(done)], measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("kv_disk_turns", description="Agents in turns with and without a disk.")
    parser.add_argument("--requests", type=COUNT, default=128, metavar="N")
    parser.add_argument("--rounds", type=COUNT, default=3, metavar="N")
    share = "of all contexts that the pool holds"
    parser.add_argument("--share", type=FRACTION, default=0.25, metavar="S", help=share)
    args = parser.parse_args(argv)
    trace = make_turns(args.requests)
    num_blocks = num_blocks_of(trace, args.share)
    for _ in range(args.rounds):
        directory = Path(tempfile.mkdtemp(prefix="kv_disk"))
        expected, without = play(trace, num_blocks, None)
        tokens, with_disk = play(trace, num_blocks, directory)
        shutil.rmtree(directory)
        assert tokens == expected, "other tokens with the disk"
        print(json.dumps({"without": without, "with": with_disk}, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
