"""How fast rows decode with one adapter, and with one adapter each, beside rows without one.

One engine with as many adapters as rows serves three courses in turns: "none", "one" and "each".
The adapters have random numbers and change all linear layers. Steps are timed from the one in which
all rows decode.

    python -m bench.adapters --model smollm2-bfloat16
"""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from bench.command import print_result, table
from bench.flags.adapters import parse
from bench.machine import check_machine, machine_text
from bench.models import named_model, random_prompts
from bench.pairs import in_turns, ratio
from mlx_paged import Engine
from mlx_paged.adapters.places import places_of

SIZE = 0.02
"""Of the numbers of a factor."""


def random_factors(model: nn.Module, rank: int, seed: int) -> dict[str, mx.array]:
    """Factors of all linear layers of a model without experts, by mlx-lm's names."""
    arrays = {}
    keys = iter(mx.random.split(mx.random.key(seed), 2 * len(places_of(model))))
    for path, place in places_of(model).items():
        shapes = {"a": (place.inputs, rank), "b": (rank, place.outputs)}
        for factor, shape in shapes.items():
            arrays[f"{path}.lora_{factor}"] = SIZE * mx.random.normal(shape, key=next(keys))
    return arrays


def decode(
    engine: Engine, prompts: Sequence[list[int]], adapters: Sequence[str | None], max_tokens: int
) -> float:
    """Tokens a second of steps in which all requests decode."""
    for prompt, adapter in zip(prompts, adapters, strict=True):
        engine.add_request(prompt, max_tokens=max_tokens, adapter=adapter, ignore_eos=True)
    waiting, started, count = len(prompts), 0.0, 0
    while engine.has_work:
        outputs = engine.step()
        if waiting > 0:
            waiting -= len(outputs)
            started = time.perf_counter()
        else:
            count += len(outputs)
    return count / (time.perf_counter() - started)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    model = named_model(args.model)
    engine = Engine(model, adapters={}, max_running=args.rows)
    names = [f"a{i}" for i in range(args.rows)]
    for seed, name in enumerate(names):
        engine.update_adapter(name, random_factors(model, args.rank, seed), scale=1.0)
    prompts = random_prompts(args.rows, args.prompt_tokens, args.model)
    adapters = {"none": [None] * args.rows, "one": names[:1] * args.rows, "each": names}
    courses = {
        course: partial(decode, engine, prompts, own, args.max_tokens)
        for course, own in adapters.items()
    }
    rates = in_turns(courses, args.rounds, warm_up=1)
    print(f"{args.rows} rows, rank {args.rank}, rounds: {args.rounds}; {machine_text(machine)}.")
    result: dict[str, Any] = {**vars(args), **machine, "courses": {}}
    rows = [["adapters", "tokens/s", "of none", "lowest", "highest"]]
    for course, found in rates.items():
        of_none = [round(value, 3) for value in ratio(found, rates["none"])]
        rate = round(median(found), 1)
        result["courses"][course] = {"tokens_s": rate, "of_none": of_none}
        rows.append([course, f"{rate:.1f}", *(f"{value:.2f}" for value in of_none)])
    print(table(rows))
    print_result("adapters", result)


if __name__ == "__main__":
    main()
