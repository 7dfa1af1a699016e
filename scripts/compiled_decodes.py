"""Compares compiled decodes with plain ones, and counts what is traced after the warm-up.

    python -m scripts.compiled_decodes
    python -m scripts.compiled_decodes --joins 10000

The first command runs every architecture of mlx-lm as a tiny random model on the CPU, with and
without compiled decodes: prompts that arrive while others decode, samples of one prompt, and a pool
so small that requests are preempted. It prints what is compiled, or why not, and fails where a
token, a log-probability or a byte of the pool differs. The second one lets requests join and leave.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import Engine, UnsupportedModelError
from mlx_paged.cli import COUNT
from mlx_paged.runner.model_runner import ModelRunner
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, VARIANTS, VOCAB, build

MAX_ROWS = 6
TOKENS = 24


def is_compiled(engine: Engine) -> bool:
    """Whether the engine computes its decodes by compiled graphs."""
    return isinstance(engine.runner, ModelRunner) and engine.runner.compiled is not None


def num_traces(engine: Engine) -> int:
    return 0 if engine.stats.traces is None else engine.stats.traces.count


def course(model: nn.Module, is_compiled: bool, **options: Any) -> tuple[Engine, list[object]]:
    """An engine, and the completions of requests that join and leave: id, tokens, bits of the
    log-probabilities."""
    given = {"block_size": 4, "num_blocks": 40, "max_running": MAX_ROWS, "prefill_chunk": 8}
    engine = Engine(model, compile=is_compiled, **given | options)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(2, 20, 8)]
    params: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": 4}
    done: list[object] = []
    engine.add_samples(prompts[0], 2, temperature=1.0, seed=5, **params)
    while prompts or engine.has_work:
        if prompts:
            engine.add_request(prompts.pop(), **params)
        for output in engine.step():
            if output.completion is not None:
                ended = output.completion
                done.append((output.request_id, ended.tokens, ended.logprobs, ended.top_logprobs))
    return engine, done


def stored(engine: Engine) -> list[bytes]:
    """The bytes of all arrays of the pool."""
    handles = engine.manager.pool.handles()
    return [np.array(mx.contiguous(handle).view(mx.uint8)).tobytes() for handle in handles]


def compare(model: nn.Module, **options: Any) -> str:
    """What is compiled, and whether that is the same as without."""
    plain, expected = course(model, False, **options)
    compiled, found = course(model, True, **options)
    assert isinstance(compiled.runner, ModelRunner)
    if not is_compiled(compiled):
        return f"not compiled: {compiled.runner.why_plain}"
    preempted = compiled.stats.preemptions
    same = [
        found == expected,
        stored(compiled) == stored(plain),
        preempted == plain.stats.preemptions,
        compiled.stats.faults == 0,
    ]
    traces = num_traces(compiled)
    return (
        f"{'same' if all(same) else f'DIFFERENT {same}'}, {preempted} preemptions, {traces} traces"
    )


def joins_and_leaves(count: int) -> tuple[int, int]:
    """Traces before and after so many requests joined and left."""
    engine = Engine(build("llama"), block_size=4, num_blocks=400, max_running=32, compile=True)
    before = num_traces(engine)
    rng, left = np.random.default_rng(0), count
    while left or engine.has_work:
        for _ in range(min(left, int(rng.integers(0, 3)))):
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
            engine.add_request(prompt, max_tokens=int(rng.integers(1, 40)))
            left -= 1
        engine.step()
    return before, num_traces(engine)


def names() -> Iterable[str]:
    return sorted({*ARCHITECTURES, *VARIANTS} - {*NOT_ON_A_CPU}, key=str.casefold)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="compiled_decodes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--joins", type=COUNT, help="requests that join and leave")
    args = parser.parse_args(argv)
    mx.set_default_device(mx.Device(mx.cpu))
    if args.joins is not None:
        before, after = joins_and_leaves(args.joins)
        print(f"{before} traces in the warm-up, {after - before} in {args.joins} joins and leaves")
        raise SystemExit(before != after)
    found = Counter[str]()
    for name in args.names or names():
        try:
            result = compare(build(name))
        except UnsupportedModelError:
            result = "refused"
        found[result.split(",")[0]] += 1
        print(f"{name:24} {result}", flush=True)
    print(*(f"{count:4} {result}" for result, count in found.most_common()), sep="\n")
    raise SystemExit(any("DIFFERENT" in result for result in found))


if __name__ == "__main__":
    main()
