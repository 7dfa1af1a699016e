"""What compiled decodes save: the graph of a step, whole steps, and what rows of padding cost.

    python -m scripts.decode_graphs graphs      # beside mlx-lm's batch generator
    python -m scripts.decode_graphs steps       # the demo model and one of 28 layers
    python -m scripts.decode_graphs padding     # the largest share of padding
    python -m scripts.decode_graphs reference   # the reference workload of bench.serving
    python -m scripts.decode_graphs parts       # where the host's time of a compiled step goes
    python -m scripts.decode_graphs thin        # the fixed part of a step, with and without groups

All engines of a table take turns in one process. The last line is one JSON object. None takes more
than five minutes on two idle cores.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.command import print_result, table
from bench.flags.presets import PRESETS
from bench.host_cost.graph_costs import Timed, graph_costs
from bench.machine import check_machine, machine_text
from bench.models import llama_model, random_llama
from bench.names import SIZES
from bench.pairs import in_turns, ratio
from bench.serving.workload import make_jobs
from mlx_paged import Engine, SamplingParams
from mlx_paged.cli import COUNT, Parser
from mlx_paged.loading import load_model
from mlx_paged.runner import batch, compiled_decode
from mlx_paged.runner.model_runner import ModelRunner

WARM_UP = 8
PROMPT = 20


def deep_llama(layers: int) -> nn.Module:
    """A Llama of so many layers and a hidden size of 128, random float32 weights."""
    return random_llama(SIZES["tiny"] | {"hidden_size": 128, "num_hidden_layers": layers})


def decoding(model: nn.Module, rows: int, num_steps: int, is_compiled: bool) -> Engine:
    """An engine that decodes `rows` requests for so many more steps."""
    tokens = num_steps + WARM_UP
    blocks = 2 * rows * -(-(PROMPT + tokens) // 16) + 8
    engine = Engine(model, num_blocks=blocks, max_running=rows, compile=is_compiled)
    prompts = np.random.default_rng(0).integers(0, 100, (rows, PROMPT)).tolist()
    for prompt in prompts:
        engine.add_request(prompt, max_tokens=tokens)
    while len(engine.step()) < rows:
        pass
    return engine


@dataclass
class Course:
    """An engine in turns with another one; `within` is the context of its steps."""

    engine: Engine
    within: Callable[[], AbstractContextManager[object]] = nullcontext

    def milliseconds(self, num_steps: int) -> float:
        """The median time of some steps."""
        laps = []
        with self.within():
            for _ in range(num_steps):
                started = time.perf_counter()
                self.engine.step()
                laps.append(1000 * (time.perf_counter() - started))
        return median(laps)


def compare(
    first: "Course | Workload", second: "Course | Workload", pairs: int, steps: int
) -> dict[str, Any]:
    """Times of both courses in turns, and how much longer the first one takes, pair by pair."""
    courses = {"first": first, "second": second}
    runs = {name: partial(course.milliseconds, steps) for name, course in courses.items()}
    times = in_turns(runs, pairs, title="pairs")
    found = ratio(times["first"], times["second"])
    return {
        "first_ms": round(median(times["first"]), 3),
        "second_ms": round(median(times["second"]), 3),
        "ratio": round(found.median, 4),
        "lowest": round(found.lowest, 4),
        "highest": round(found.highest, 4),
    }


def graphs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Processor time of the graph of a step, by rows."""
    costs = graph_costs(args.layers, args.rows or [1, 8, 32], args.steps)
    for each in costs:
        compiled = each["compiled graph_us"]
        each["compiled over plain"] = round(compiled / each["plain graph_us"], 3)
        each["mlx-lm over compiled"] = round(each["mlx-lm graph_us"] / compiled, 2)
    return costs


def steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole steps: plain over compiled."""
    found = []
    total = args.pairs * args.steps
    for name, model in (("demo", load_model(None)[0]), (args.layers, deep_llama(args.layers))):
        for rows in args.rows or [1, 8]:
            plain, compiled = (Course(decoding(model, rows, total, flag)) for flag in (False, True))
            assert compiled.engine.stats.traces is not None
            found.append(
                {
                    "model": str(name),
                    "rows": rows,
                    **compare(plain, compiled, args.pairs, args.steps),
                }
            )
    return found


def _unpadded() -> AbstractContextManager[object]:
    """Within this context batches get no rows of padding."""
    return patch.object(batch, "row_bucket", int)


def padding(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps with rows of padding over steps of the same rows without any."""
    model, found, total = deep_llama(args.layers), [], args.pairs * args.steps
    for rows in args.rows or [33, 65]:
        with _unpadded(), patch.object(compiled_decode, "row_bucket", int):
            bare = Course(decoding(model, rows, total, True), _unpadded)
        padded = Course(decoding(model, rows, total, True))
        more = batch.row_bucket(rows) - rows
        found.append(
            {"rows": rows, "padding": more, **compare(padded, bare, args.pairs, args.steps)}
        )
    return found


class Workload:
    """The reference workload of bench.serving: all requests come at once, and 32 of them run."""

    def __init__(self, num_requests: int | None, is_compiled: bool) -> None:
        model = llama_model()
        self.jobs = make_jobs(PRESETS["reference"], model.args.vocab_size, 0, num_requests)
        blocks = 32 * -(-max(job.kv_tokens for job in self.jobs) // 16) + 8
        self.engine = Engine(
            model, num_blocks=blocks, max_running=32, prefix_cache=False, compile=is_compiled
        )
        self.tokens = list[list[int]]()

    def milliseconds(self, num_runs: int) -> float:
        """The median time of some runs."""
        params = [SamplingParams(max_tokens=job.max_tokens, ignore_eos=True) for job in self.jobs]
        laps = []
        for _ in range(num_runs):
            started = time.perf_counter()
            done = self.engine.generate([list(job.prompt) for job in self.jobs], params)
            laps.append(1000 * (time.perf_counter() - started))
        self.tokens = [completion.tokens for completion in done]
        return median(laps)


def reference(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The reference workload: plain over compiled. Both have the same tokens."""
    plain, compiled = (Workload(args.requests, flag) for flag in (False, True))
    assert compiled.engine.stats.traces is not None
    for each in (plain, compiled):
        each.milliseconds(1)
    found = compare(plain, compiled, args.pairs, 1)
    assert plain.tokens == compiled.tokens
    tokens = sum(map(len, plain.tokens))
    return [{"requests": len(plain.jobs), "output_tokens": tokens, **found}]


PARTS = {
    "schedule": ("scheduler", "schedule"),
    "arrays of the batch": ("runner", "_batches"),
    "graph": ("runner", "_forward"),
    "sampler": ("runner", "sampler"),
    "evaluation": ("runner", "_begin"),
    "results": ("runner", "collect"),
}
"""What an engine calls in a step: an attribute, and one of its own."""


def parts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Processor time of the engine's thread in a compiled step, us: medians over the steps. What
    MLX's other threads compute is not in it. "other" is the whole step without these parts."""
    model, found = deep_llama(args.layers), []
    for rows in args.rows or [1, 8, 32]:
        engine = decoding(model, rows, args.steps, True)
        timed = {
            name: _timed(getattr(engine, owner), call) for name, (owner, call) in PARTS.items()
        }
        laps = []
        for _ in range(args.steps):
            for each in timed.values():
                each.seconds = 0.0
            started = time.thread_time()
            engine.step()
            lap = {"step": time.thread_time() - started}
            lap |= {name: each.seconds for name, each in timed.items()}
            laps.append(lap | {"other": 2 * lap["step"] - sum(lap.values())})
        medians = {name: round(1e6 * median(lap[name] for lap in laps), 1) for name in laps[0]}
        found.append({"rows": rows, **medians})
    return found


def _timed(owner: Any, call: str) -> Timed:
    timed = Timed(getattr(owner, call))
    setattr(owner, call, timed)
    return timed


THIN = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 512,
}
"""SmolLM2's heads in a model without products to speak of."""


CLOCKS = {
    "wall_ms": time.perf_counter,
    "process_ms": time.process_time,
    "thread_ms": time.thread_time,
}
THIN_FORMS = {"groups": True, "nodes": False}
"""Steps that :func:`thin` compares: whether nodes of the graph are grouped."""


def thin_llama(layers: int) -> nn.Module:
    """A Llama whose step has little but a fixed part."""
    return random_llama(THIN | {"num_hidden_layers": layers})


def thin(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of one row with groups of nodes and with a node for each: milliseconds of wall time, of
    processor time of all threads, and of the thread that makes the step; medians over steps in
    turns. Each pair of turns has new engines, so that contexts stay at 28 to 28 + `steps` tokens.
    """
    model = thin_llama(args.layers)
    laps = {(name, clock): list[float]() for name in THIN_FORMS for clock in CLOCKS}
    for _ in range(args.pairs):
        engines = dict[str, Engine]()
        for name, groups in THIN_FORMS.items():
            with patch.object(compiled_decode, "groups_nodes", lambda groups=groups: groups):
                engines[name] = decoding(model, 1, args.steps + WARM_UP, True)
                for _ in range(WARM_UP):
                    engines[name].step()
        for _ in range(args.steps):
            for name, engine in engines.items():
                started = {clock: read() for clock, read in CLOCKS.items()}
                engine.step()
                for clock, read in CLOCKS.items():
                    laps[name, clock].append(1000 * (read() - started[clock]))
    return [
        {
            "a step of": name,
            "nodes": _num_nodes(engine),
            **{clock: round(median(laps[name, clock]), 3) for clock in CLOCKS},
        }
        for name, engine in engines.items()
    ]


def _num_nodes(engine: Engine) -> int:
    """Of the graph that is used most."""
    assert isinstance(engine.runner, ModelRunner) and engine.runner.compiled is not None
    graphs = [each for each in engine.runner.compiled._graphs.values() if each]
    return next(iter(graphs[0].values())).num_nodes


COMMANDS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    each.__name__: each for each in (graphs, steps, padding, reference, parts, thin)
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="decode_graphs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=COMMANDS)
    parser.add_argument("--layers", type=COUNT, default=28, help="of the random Llama")
    parser.add_argument("--rows", type=COUNT, nargs="+", help="running requests")
    parser.add_argument("--steps", type=COUNT, default=40, help="of an engine in its turn")
    parser.add_argument("--requests", type=COUNT, help="of the reference workload (default: 96)")
    parser.add_argument("--pairs", type=COUNT, default=12, help="of turns")
    args = parser.parse_args(argv)
    mx.set_default_device(mx.Device(mx.cpu))
    machine = check_machine()
    print(machine_text(machine), file=sys.stderr)
    found = COMMANDS[args.table](args)
    print(table([list(found[0]), *([str(value) for value in each.values()] for each in found)]))
    print_result(f"decode_graphs {args.table}", {**machine, args.table: found})


if __name__ == "__main__":
    main()
