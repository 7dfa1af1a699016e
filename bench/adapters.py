"""How fast rows decode with one adapter, and with one adapter each, beside rows without one.

Three engines on one model: the rows of "none" have no adapter, those of "one" the same, those of
"each" another one each. The adapters have random numbers and change all linear layers. The engines
take turns step by step, so that other load on the machine meets all three; a ratio is the median of
the turns. Processor time is that of all threads, those that wait for work included.

    python -m bench.adapters --model smollm2-bfloat16

With ``--many N``, N adapters are loaded from their folders one after another, and each serves a
token at once, while `--rows` requests without adapters stream. Half of them fit into the memory.
Then each serves a token again, for which it is read again. Seconds of a load, of the load and its
first token, of the token after an eviction, of a token of the base, and the longest time between
two tokens of a stream before and meanwhile.
"""

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from bench.command import print_result, table
from bench.flags.adapters import parse
from bench.machine import check_machine, machine_text
from bench.models import named_model, random_prompts
from mlx_paged import Engine, EngineService, SamplingParams
from mlx_paged.engine.ticket import Ticket
from mlx_paged.runner.low_rank_places import places_of

SIZE = 0.02
"""Of the numbers of a factor."""
QUIET_S = 3.0
"""How long streams run before the first load."""
STREAM_TOKENS = 8000
BASE_TOKENS = 5
WARM_UP = 6
"""Steps that are not timed."""


def random_factors(model: nn.Module, rank: int, seed: int) -> dict[str, mx.array]:
    """Factors of all linear layers of a model without experts, by mlx-lm's names."""
    arrays = {}
    keys = iter(mx.random.split(mx.random.key(seed), 2 * len(places_of(model))))
    for path, place in places_of(model).items():
        shapes = {"a": (place.inputs, rank), "b": (rank, place.outputs)}
        for factor, shape in shapes.items():
            arrays[f"{path}.lora_{factor}"] = SIZE * mx.random.normal(shape, key=next(keys))
    return arrays


def decoding(model: nn.Module, adapters: Sequence[str | None], args: argparse.Namespace) -> Engine:
    """An engine all of whose rows decode, one with each of these adapters."""
    engine = Engine(model, adapters={}, max_running=args.rows)
    names = sorted({name for name in adapters if name is not None})
    for seed, name in enumerate(names):
        engine.update_adapter(name, random_factors(model, args.rank, seed), scale=1.0)
    max_tokens = args.rows + 2 * WARM_UP + args.steps + 1
    prompts = random_prompts(args.rows, args.prompt_tokens, args.model)
    for prompt, adapter in zip(prompts, adapters, strict=True):
        engine.add_request(prompt, max_tokens=max_tokens, adapter=adapter, ignore_eos=True)
    waiting = args.rows
    while waiting > 0:
        waiting -= len(engine.step())
    for _ in range(WARM_UP):
        engine.step()
    return engine


def seconds_of(engine: Engine) -> tuple[float, float]:
    """The wall time and the processor time of a step."""
    cpu, wall = time.process_time(), time.perf_counter()
    engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def write_adapters(folder: Path, model: nn.Module, args: argparse.Namespace) -> list[Path]:
    """Folders of `many` adapters as mlx_lm.lora writes them, in the dtype of their layers."""
    config = {"fine_tune_type": "lora", "num_layers": -1}
    config["lora_parameters"] = {"rank": args.rank, "scale": 1.0, "dropout": 0.0}
    dtype = next(iter(places_of(model).values())).dtype
    paths = [folder / f"a{i}" for i in range(args.many)]
    for seed, path in enumerate(paths):
        path.mkdir()
        arrays = random_factors(model, args.rank, seed)
        halves = {name: each.astype(dtype) for name, each in arrays.items()}
        mx.save_safetensors(str(path / "adapters.safetensors"), halves)
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


class Streams:
    """Requests without adapters that stream, and the times of their tokens."""

    def __init__(self, service: EngineService, args: argparse.Namespace) -> None:
        params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)
        prompts = random_prompts(args.rows, args.prompt_tokens, args.model)
        self._tickets = [service.submit(prompt, params) for prompt in prompts]
        self._times: list[list[float]] = [[] for _ in prompts]
        for pair in zip(self._tickets, self._times, strict=True):
            Thread(target=self._read, args=pair, daemon=True).start()

    @staticmethod
    def _read(ticket: Ticket, times: list[float]) -> None:
        for _ in ticket:
            times.append(time.perf_counter())

    def longest_gap(self, start: float) -> float:
        """Seconds between two tokens of a stream from `start` on, at most."""
        late = [[t for t in times if t >= start] for times in self._times]
        return max((b - a for times in late for a, b in pairwise(times)), default=0.0)

    def end(self) -> None:
        """End the requests. Raises SystemExit if one has ended by itself: then the gaps are not
        those of all loads."""
        lasted = not any(ticket.done for ticket in self._tickets)
        for ticket in self._tickets:
            ticket.abort()
        if not lasted:
            raise SystemExit(f"a stream ended after {STREAM_TOKENS} tokens: take fewer --many")


def load_many(model: nn.Module, args: argparse.Namespace) -> None:
    """Print what loads of many adapters cost."""
    with TemporaryDirectory() as folder:
        paths = write_adapters(Path(folder), model, args)
        size = sum(place.num_bytes(max(args.rank, 8)) for place in places_of(model).values())
        held = max(1, args.many // 2)
        options = {"max_running": args.rows + 1, "adapter_memory": held * size}
        engine = Engine(model, adapters={}, max_stall_ms=args.max_stall_ms, **options)
        with EngineService(engine) as service:
            streams = Streams(service, args)
            time.sleep(QUIET_S)
            quiet = streams.longest_gap(0.0)
            gaps = {"quiet_gap_s": quiet}
            base = [_first_token(service, None) for _ in range(BASE_TOKENS)]
            loads, firsts, start = list[float](), list[float](), time.perf_counter()
            for path in paths:
                began = time.perf_counter()
                files = engine.read_adapter(path.name, path)
                service.call(partial(Engine.load_adapter, name=path.name, path=files))
                loads.append(time.perf_counter() - began)
                firsts.append(loads[-1] + _first_token(service, path.name))
            gaps["gap_s"], start = streams.longest_gap(start), time.perf_counter()
            again = [_first_token(service, path.name) for path in paths]
            gaps["again_gap_s"] = streams.longest_gap(start)
            streams.end()
    found = {"megabytes": round(size / 1e6, 1), "held": held} | gaps
    courses = {"base_token": base, "load": loads, "first_token": firsts, "again_token": again}
    for name, seconds in courses.items():
        found |= {f"{name}_median_s": median(seconds), f"{name}_longest_s": max(seconds)}
    rows = [["what", "value"], *([name, f"{value:.3f}"] for name, value in found.items())]
    print(table(rows))
    print_result("adapters", vars(args) | found)


def _first_token(service: EngineService, adapter: str | None) -> float:
    """Seconds of a request for one token."""
    began = time.perf_counter()
    service.submit([1, 2, 3], SamplingParams(max_tokens=1, adapter=adapter)).result()
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    model = named_model(args.model)
    if args.many is not None:
        return load_many(model, args)
    each = [f"a{i}" for i in range(args.rows)]
    courses = {"none": [None] * args.rows, "one": each[:1] * args.rows, "each": each}
    engines = {course: decoding(model, names, args) for course, names in courses.items()}
    found = dict[str, list[tuple[float, float]]]({course: [] for course in courses})
    order = list(courses)
    for _ in range(args.steps):
        order = order[1:] + order[:1]
        for course in order:
            found[course].append(seconds_of(engines[course]))
    print(f"{args.rows} rows, rank {args.rank}, steps: {args.steps}; {machine_text(machine)}.")
    result: dict[str, Any] = {**vars(args), **machine, "courses": {}}
    rows = [["adapters", "tokens/s", "of none", "processor ms", "of none"]]
    for course, times in found.items():
        wall, cpu = (median(column) for column in zip(*times, strict=True))
        pairs = list(zip(found["none"], times, strict=True))
        of_none = [round(median(one[i] / own[i] for one, own in pairs), 3) for i in (0, 1)]
        rate = round(args.rows / wall, 1)
        own = {"tokens_s": rate, "of_none": of_none[0], "processor_of_none": of_none[1]}
        result["courses"][course] = own
        ms = f"{1e3 * cpu:.1f}"
        rows.append([course, f"{rate:.1f}", f"{of_none[0]:.2f}", ms, f"{of_none[1]:.2f}"])
    print(table(rows))
    print_result("adapters", result)


if __name__ == "__main__":
    main()
