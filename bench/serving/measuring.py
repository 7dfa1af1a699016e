"""All runs that were asked for: the comparison, then the search for each engine's highest rate."""

import argparse

from tqdm import tqdm

from bench.serving.arrivals import arrival_times
from bench.serving.engines import static_sibling
from bench.serving.rate_search import Probe, search
from bench.serving.results import Rates
from bench.serving.run import Run
from bench.serving.session import Session
from bench.serving.slo import Slo
from bench.serving.sources import OpenLoop
from bench.serving.trace import Trace, make_trace

SEARCH_START = 0.8
"""Part of the throughput measured before, in requests, that a rate search begins with."""


def measure(args: argparse.Namespace, session: Session, trace: Trace, rates: Rates) -> None:
    """Fill `session.runs` and `rates`; what was measured before an interrupt stays there."""
    siblings = [static_sibling(name) for name in args.engines] if args.static else []
    engines = list(dict.fromkeys([*args.engines, *(name for name in siblings if name)]))
    num_tokens = sum(job.output_tokens for job in trace)
    with tqdm(total=args.rounds * len(engines) * num_tokens, unit="token", disable=None) as bar:
        session.on_tokens = bar.update
        bar.set_description("warm-up")
        session.warm_up(engines)
        session.compare(engines, trace, args.rounds, bar.set_description)
        for name in args.engines if args.max_rate else ():
            bar.set_description(f"{name}, rate")
            rates.probes[name] = []

            def probe(rate: float, name: str = name) -> Probe:
                bar.total += num_tokens
                times = arrival_times(len(trace), rate, args.burstiness, args.seed)
                timed = make_trace(trace, times)
                run = session.play(name, timed, OpenLoop(timed), keep=False)
                rates.probes[name].append(_probe(rate, run, args.slo))
                return rates.probes[name][-1]

            start = SEARCH_START * len(trace) / session.runs[name][0].wall_s
            rates.max_rate[name] = search(probe, start, args.attainment)


def _probe(rate: float, run: Run, slo: Slo) -> Probe:
    good = [stream for stream in run.streams if slo.holds(stream)]
    return Probe(
        rate,
        len(good) / len(run.streams),
        run.output_tokens / run.wall_s,
        sum(len(stream.tokens) for stream in good) / run.wall_s,
    )
