"""Requests of many kinds on one engine; prints their tokens as JSON.

    python -m tests.support.engine.rank_runs llama
    mlx.launch -n 2 --backend ring -- python -m tests.support.engine.rank_runs llama

Under mlx.launch all ranks compute them, and rank 0 prints. `reference` behind the model's name: 96
requests as long as those of the reference workload. `mixed`: 96 requests of all kinds at once, then
`compare` lists the first difference of each with the margin of the token in the first file.

    python -m tests.support.engine.rank_runs compare ALONE.json RANKS.json

A name may go on with a dtype or with a number of K/V heads: llama:bfloat16, llama:4.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import Completion, Engine
from mlx_paged.runner.ranks import joined
from mlx_paged.scheduler.speculation import Speculation
from tests.support import TIMEOUT
from tests.support.models.architectures import build
from tests.support.models.tiny_models import CONFIGS, tiny_model
from tests.support.simulation.injected_drafts import every_guess

ROOT = Path(__file__).parents[3]
TRACE = [[7 + i % 5, *range(3 + i, 40 + 3 * i)] for i in range(6)]
REPEATING = [[5, 6, 7, 8] * 6, [9, 1, 9, 1, 9, 1, 9, 1, 3]]
SMALL = {"block_size": 4, "num_blocks": 64, "prefill_chunk": 16, "max_running": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {"num_blocks": 34, "max_running": 6},
    "synchronous": {"lookahead": False},
    "quantized": {"kv_bits": 4},
    "ngram": {"speculate": "ngram"},
    "drafted": {"draft_model": tiny_model("llama", seed=1, vocab_size=64)},
    "compiled": {"compile": True},
    "profiled": {"profile": True},
}


def model_of(name: str) -> nn.Module:
    name, _, more = name.partition(":")
    heads = {"num_key_value_heads": int(more)} if more.isdecimal() else {}
    model = tiny_model(name, vocab_size=64, **heads) if name in CONFIGS else build(name, **heads)
    if more and not heads:
        model.set_dtype(getattr(mx, more))
    return model


@patch.object(Speculation, "_depths", every_guess)  # how many must not depend on a clock
def tokens_of(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens of greedy and drawn requests, samples, forks, beams, and of a prompt's second turn."""
    engine = Engine(model, **{**SMALL, **options})
    found: dict[str, Any] = {}
    trace = [[token % 60 for token in prompt] for prompt in TRACE]
    found["greedy"] = [c.tokens for c in engine.generate(trace + REPEATING, max_tokens=12)]
    found["drawn"] = [
        c.tokens for c in engine.generate(trace[:4], max_tokens=9, temperature=0.8, seed=3)
    ]
    groups = engine.sample(trace[:2], n=3, max_tokens=7, temperature=1.0, seed=5)
    found["samples"] = [[c.tokens for c in group] for group in groups]
    turns = [trace[0] + found["greedy"][0] + [1, 2]]
    completions = engine.generate(turns, max_tokens=6, logprobs=2, repetition_penalty=1.3)
    found["turn"] = [c.tokens for c in completions]
    found["cached"] = completions[0].cached_prompt_tokens
    trunk = engine.add_request(trace[1], max_tokens=5, keep=True)
    done: dict[int, Completion] = {}
    while engine.has_work:
        collect(engine, done)
    for suffix in ([4], [9, 9]):
        engine.fork(trunk, suffix, max_tokens=5)
    aborted = engine.add_request(trace[2], max_tokens=30)
    for _ in range(3):
        collect(engine, done)
    engine.abort(aborted)
    engine.release(trunk)
    while engine.has_work:
        collect(engine, done)
    found["forks"] = [done[request_id].tokens for request_id in sorted(done)]
    found["beams"] = [b.tokens for b in engine.beam_search(trace[3], 3, max_tokens=6).beams]
    metrics = engine.metrics()
    found["preemptions"] = metrics["preemptions"]
    found["drafts"] = metrics["drafts"]
    found["leaks"] = engine.scheduler.allocator.store.blocks_in_use
    found["ranks"] = metrics["ranks"]
    found["kv_pool_bytes"] = metrics["kv_pool_bytes"]
    return found


def collect(engine: Engine, done: dict[int, Completion]) -> None:
    for output in engine.step():
        if output.completion is not None:
            done[output.request_id] = output.completion


def reference_trace(model: nn.Module) -> dict[str, Any]:
    """Tokens of 96 requests as long as those of the bench's reference workload, in a pool that is
    too small for 32 of them."""
    rng = np.random.default_rng(0)
    engine = Engine(model, block_size=16, num_blocks=500, prefill_chunk=96, max_running=32)
    done: dict[int, Completion] = {}
    for _ in range(96):
        prompt = rng.integers(1, 60, size=rng.integers(32, 512)).tolist()
        engine.add_request(prompt, max_tokens=int(rng.integers(32, 192)), ignore_eos=True)
        collect(engine, done)
    while engine.has_work:
        collect(engine, done)
    metrics = engine.metrics()
    return {"tokens": [done[request_id].tokens for request_id in sorted(done)]} | {
        name: metrics[name] for name in ("preemptions", "ranks")
    }


def mixed_trace(model: nn.Module, count: int = 96) -> dict[str, Any]:
    """Tokens of `count` requests with common beginnings, in a pool that is too small: greedy,
    drawn, samples, beams, kept ones; forks and aborts at fixed steps. With each token the margin
    over the next likely one."""
    rng = np.random.default_rng(1)
    sizes = {"num_blocks": 48, "prefill_chunk": 48, "max_running": 12}
    engine = Engine(model, block_size=8, **sizes)
    starts = rng.integers(1, 60, size=(3, 64)).tolist()
    done: dict[int, Completion] = {}
    newest, counts = list[int](), dict.fromkeys(("forks", "aborts"), 0)
    for number in range(count):
        prompt = starts[number % 3][: rng.integers(8, 64)]
        prompt += rng.integers(1, 60, size=rng.integers(4, 60)).tolist()
        options: dict[str, Any] = {"max_tokens": int(rng.integers(12, 48))}
        kind = number % 6
        if kind == 2:
            engine.add_samples(prompt, 3, temperature=1.0, seed=number, **options)
        elif kind == 3:
            engine.add_beam_search(prompt, 3, **options)
        else:
            options |= {"temperature": 0.8, "seed": number} if kind == 1 else {"logprobs": 2}
            newest.append(engine.add_request(prompt, keep=kind == 4, **options))
        for _ in range(2):
            collect(engine, done)
        if kind == 5:
            order = newest[:: (-1) ** (number // 6)]  # one that runs, or the oldest that is kept
            parent = next(i for i in order if engine.request(i))
            suffix = rng.integers(1, 60, size=number // 6 % 3).tolist()
            engine.fork(parent, suffix, max_tokens=16, logprobs=2)
            counts["forks"] += 1
        aborted = engine.abort(newest[-2]) if number % 5 == 4 else None
        if aborted is not None:
            done[aborted.request_id] = aborted
            counts["aborts"] += 1
    while engine.has_work:
        collect(engine, done)
    for request_id in newest:
        engine.release(request_id)
    found = [done[request_id] for request_id in sorted(done)]
    metrics = engine.metrics()
    return counts | {
        "tokens": [[b.tokens for b in c.beams] or [c.tokens] for c in found],
        "margins": [[top[0][1] - top[1][1] for top in c.top_logprobs] for c in found],
        "cached": sum(c.cached_prompt_tokens for c in found),
        "leaks": engine.scheduler.allocator.store.blocks_in_use,
        **{name: metrics[name] for name in ("preemptions", "ranks", "kv_pool_bytes")},
    }


def differences(alone: dict[str, Any], ranks: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of each request that differs: its number, the first different token, its margin alone."""
    found = []
    for number, (ours, theirs) in enumerate(zip(alone["tokens"], ranks["tokens"], strict=True)):
        if ours != theirs:
            pairs = zip(ours[0], theirs[0], strict=False)
            at = next((i for i, (own, other) in enumerate(pairs) if own != other), None)
            margins = alone["margins"][number]
            found.append((number, at, margins[at] if margins and at is not None else None))
    return found


def stream_for_long(model: nn.Module) -> None:
    """A request that nobody waits for the end of; a line for each hundred tokens."""
    engine = Engine(model, num_blocks=4096, block_size=16)
    for count, _ in enumerate(engine.stream([1, 2, 3], max_tokens=60_000)):
        if count % 100 == 0:
            print(count, flush=True)


def two_ranks(
    arguments: Sequence[str], num_ranks: int = 2, **options: Any
) -> list[subprocess.Popen[str]]:
    """The processes of a command, as mlx.launch starts them: rank 0 first."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ranks)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    path = Path(tempfile.mkdtemp()) / "hosts.json"
    path.write_text(json.dumps(hosts))
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            **options,
        )
        for rank in range(num_ranks)
    ]


def ended(
    processes: Sequence[subprocess.Popen[str]], timeout: float = TIMEOUT
) -> list[tuple[str, str, int]]:
    """Output, errors and exit status of each."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(*each, process.returncode) for each, process in zip(outputs, processes, strict=True)]


RUNS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    **{name: partial(tokens_of, options=options) for name, options in OPTIONS.items()},
    "reference": reference_trace,
    "mixed": mixed_trace,
    "few": partial(mixed_trace, count=18),
}


def main(name: str, *wanted: str) -> None:
    model = joined(model_of(name))
    if wanted == ("long",):
        return stream_for_long(model)
    found = {}
    for each in wanted or OPTIONS:
        try:
            found[each] = RUNS[each](model)
        except ValueError as error:
            found[each] = {"refused": str(error)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        alone, ranks = (json.loads(Path(path).read_text()) for path in sys.argv[2:])
        print({name: differences(alone[name], ranks[name]) for name in alone})
    else:
        main(*sys.argv[1:])
