"""How long a long prompt delays running streams: mlx_paged beside mlx-lm's BatchGenerator.

Streams decode when one long prompt arrives. The gaps between each stream's tokens are measured from
then until the prompt's first token. Engines take turns in one process; each round makes new ones.

    python -m bench.stalls --streams 8 --prompt-tokens 6000 --max-stall-ms 150
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator

from bench.command import print_result, table
from bench.flags.stalls import parse
from bench.machine import check_machine, machine_text
from bench.models import named_model, random_prompts
from bench.pairs import in_turns, ratio
from mlx_paged import Engine
from mlx_paged.scheduler.budget import MIN_CHUNK

BASELINE_STEPS = 20  # steps of decodes alone before the long prompt arrives
SETTLING_STEPS = 3  # steps after the end of a request whose gaps are not counted
MIN_CHUNKS_TIMED = 10


class Server:
    """mlx_paged's engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queue a prompt; returns its id."""
        return self.engine.add_request(prompt, max_tokens=max_tokens)

    def step(self) -> list[int]:
        """Ids of the requests that got a token."""
        return [output.request_id for output in self.engine.step()]


class MlxLmServer(Server):
    """mlx-lm's batch generator; `options` replace its defaults."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._generator = BatchGenerator(model, **options)

    def add(self, prompt: list[int], max_tokens: int) -> int:
        [request_id] = self._generator.insert([prompt], [max_tokens])
        return int(request_id)

    def step(self) -> list[int]:
        _, responses = self._generator.next()
        return [response.uid for response in responses]


class Scenario:
    """Prompts of the streams, of the request that arrives, and of one before it.

    The one before is served once, so that the cost model has seen its chunks.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.streams = random_prompts(args.streams, args.stream_tokens, args.model)
        [self.warm_up] = random_prompts(1, args.warm_up_tokens, args.model, seed=1)
        [self.long] = random_prompts(1, args.prompt_tokens, args.model, seed=2)
        chunk = min(MIN_CHUNK, args.small_step, args.prefill_chunk)
        num_steps = (len(self.warm_up) + len(self.long)) // chunk
        # More than any engine gives to a stream before the end.
        self.stream_max_tokens = num_steps + 4 * BASELINE_STEPS
        streams = sum(len(prompt) + self.stream_max_tokens for prompt in self.streams)
        self.kv_tokens = streams + len(self.warm_up) + 2 * len(self.long)


class Watch:
    """Steps a server and records when each request's tokens came, in seconds."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.times: defaultdict[int, list[float]] = defaultdict(list)

    def step(self) -> float:
        """Returns when it ended."""
        request_ids = self.server.step()
        now = time.perf_counter()
        for request_id in request_ids:
            self.times[request_id].append(now)
        return now

    def steps(self, num_steps: int) -> float:
        """Returns when the last one ended."""
        return [self.step() for _ in range(num_steps)][-1]

    def await_first(self, request_id: int) -> float:
        """Step until the request has a token; returns when that was."""
        while not self.times[request_id]:
            self.step()
        return self.times[request_id][0]

    def gaps_ms(self, request_ids: Iterable[int], since: float) -> list[float]:
        """Milliseconds between tokens of each request; the first gap is the one around `since`."""
        gaps: list[float] = []
        for request_id in request_ids:
            times = np.array(self.times[request_id])
            gaps += (1000 * np.diff(times)[times[1:] > since]).tolist()
        return gaps

    def start_streams(self, scenario: Scenario) -> list[int]:
        """Ids of the requests that decode; each has a token."""
        limit = scenario.stream_max_tokens
        request_ids = [self.server.add(prompt, limit) for prompt in scenario.streams]
        for request_id in request_ids:
            self.await_first(request_id)
        return request_ids


@dataclass(frozen=True)
class Round:
    """What one engine did once; gaps are in milliseconds, over all streams. `tokens_s` has when
    each stream got its tokens, in seconds after the long prompt arrived."""

    gaps_before: list[float]
    gaps: list[float]
    ttft_s: float
    tokens_s: list[list[float]]


def play(server: Server, scenario: Scenario) -> Round:
    """Let the streams decode, then the long prompt arrive."""
    watch = Watch(server)
    streams = watch.start_streams(scenario)
    watch.await_first(server.add(scenario.warm_up, 1))
    calm = watch.steps(SETTLING_STEPS)
    watch.steps(BASELINE_STEPS)
    gaps_before = watch.gaps_ms(streams, calm)
    arrival = time.perf_counter()
    first_token = watch.await_first(server.add(scenario.long, 1))
    gaps = watch.gaps_ms(streams, arrival)
    watch.steps(BASELINE_STEPS)
    times = [[time - arrival for time in watch.times[each]] for each in streams]
    return Round(gaps_before, gaps, first_token - arrival, times)


def play_new(make: Callable[[], Server], scenario: Scenario) -> Round:
    """The same with a new engine."""
    return play(make(), scenario)


def measure_floor(engine: Engine, scenario: Scenario) -> tuple[float, float]:
    """The least that any schedule takes, medians in milliseconds.

    A step of the streams' decodes alone; and what MIN_CHUNK tokens from the long prompt's end add.
    """
    watch = Watch(Server(engine))
    streams = watch.start_streams(scenario)
    calm = watch.steps(SETTLING_STEPS)
    watch.steps(BASELINE_STEPS)
    decode = median(watch.gaps_ms(streams, calm))

    num_tail = min(MIN_CHUNKS_TIMED * MIN_CHUNK, len(scenario.long) - 1)
    parent = engine.add_request(scenario.long[:-num_tail], max_tokens=1, keep=True)
    watch.await_first(parent)
    engine.scheduler.budget.prefill_chunk = MIN_CHUNK
    calm = watch.steps(SETTLING_STEPS)
    watch.await_first(engine.fork(parent, scenario.long[-num_tail:], max_tokens=1))
    return decode, max(0.0, median(watch.gaps_ms(streams, calm)) - decode)


def summary(rounds: list[Round], bound_ms: float, promise_ms: float) -> dict[str, Any]:
    """Medians over the rounds; the worst gap and the numbers of gaps are of all rounds together."""
    gaps = [gap for each in rounds for gap in each.gaps]

    def percentile(q: float) -> float:
        return round(median(float(np.percentile(each.gaps, q)) for each in rounds), 2)

    return {
        "gap_before_ms": round(median(median(each.gaps_before) for each in rounds), 2),
        "gap_p50_ms": percentile(50),
        "gap_p99_ms": percentile(99),
        "gap_max_ms": percentile(100),
        "gap_worst_ms": round(max(gaps), 2),
        "gaps": len(gaps),
        "gaps_above_bound": sum(gap > bound_ms for gap in gaps),
        "gaps_above_promise": sum(gap > promise_ms for gap in gaps),
        "ttft_s": round(median(each.ttft_s for each in rounds), 3),
    }


def max_gap_ratio(slow: list[Round], fast: list[Round]) -> float:
    """Largest gap of one engine over that of another in the same round: the median of rounds."""
    return ratio([max(each.gaps) for each in slow], [max(each.gaps) for each in fast]).median


def make_engine(
    args: argparse.Namespace, model: nn.Module, scenario: Scenario, max_stall_ms: float | None
) -> Engine:
    return Engine(
        model,
        max_kv_tokens=scenario.kv_tokens,
        max_running=args.streams + 1,
        prefill_chunk=args.prefill_chunk,
        max_stall_ms=max_stall_ms,
    )


def servers(
    args: argparse.Namespace, model: nn.Module, scenario: Scenario
) -> dict[str, Callable[[], Server]]:
    """By name, how each is made; the first one has the bound, the third mlx-lm's defaults."""

    def paged(max_stall_ms: float | None) -> Server:
        return Server(make_engine(args, model, scenario, max_stall_ms))

    bound, step = args.max_stall_ms, args.small_step
    return {
        f"mlx_paged, bound {bound:g} ms": lambda: paged(bound),
        f"mlx_paged, chunk {args.prefill_chunk}": lambda: paged(None),
        "mlx_lm, defaults": lambda: MlxLmServer(model),
        f"mlx_lm, prefill step {step}": lambda: MlxLmServer(model, prefill_step_size=step),
    }


def gap_table(rows: dict[str, dict[str, Any]]) -> str:
    head = ["ms", "before", "p50", "p99", "max", "worst", "gaps", "> bound", "> promise", "TTFT s"]
    return table([head, *([name, *map(str, row.values())] for name, row in rows.items())])


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    model, scenario = named_model(args.model), Scenario(args)
    print(
        f"{args.streams} streams with prompts of {args.stream_tokens} tokens decode, then a prompt"
        f" of {args.prompt_tokens} arrives. Rounds: {args.rounds}; {machine_text(machine)}.\n"
        f"Each engine first serves a prompt of {args.warm_up_tokens} tokens beside the streams:"
        " the cost model learns from it."
    )
    decode_ms, chunk_ms = measure_floor(make_engine(args, model, scenario, None), scenario)
    promise_ms = args.max_stall_ms + chunk_ms
    print(
        f"Floor: a step of decodes alone takes {decode_ms:.1f} ms; {MIN_CHUNK} tokens from the"
        f" prompt's end add {chunk_ms:.1f} ms.\nPromise: {promise_ms:.1f} ms, the bound plus"
        " such a chunk."
    )
    makers = servers(args, model, scenario)
    courses = {name: partial(play_new, make, scenario) for name, make in makers.items()}
    rounds = in_turns(courses, args.rounds, title="rounds")

    rows = {name: summary(each, args.max_stall_ms, promise_ms) for name, each in rounds.items()}
    print(gap_table(rows))
    bounded, _, stock, _ = rounds
    gap_ratio = max_gap_ratio(rounds[stock], rounds[bounded])
    print(f"Largest gap, {stock} over {bounded}: {gap_ratio:.1f}x (median of rounds)")
    result = {
        **vars(args),
        **machine,
        "floor_decode_ms": round(decode_ms, 2),
        "floor_min_chunk_ms": round(chunk_ms, 2),
        "engines": rows,
        "max_gap_ratio": round(gap_ratio, 2),
    }
    print_result("stalls", result)


if __name__ == "__main__":
    main()
