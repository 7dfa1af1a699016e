"""Engines side by side under the same requests: throughput, latency, K/V memory.

    python -m bench.serving --preset reference --engines mlx_paged,mlx_lm --rounds 3
    python -m bench.serving --request-rate 8 --slo ttft=500ms,itl=100ms --max-rate --report out
    python -m bench.serving --url http://127.0.0.1:8080 --request-rate 8

Requests come when they are due, not when an engine has time for them. The last line is one JSON
object; docs/serving-bench.md says what each value means.
"""

import sys
from collections.abc import Sequence

from bench.command import INTERRUPTED
from bench.flags.presets import BEHIND
from bench.flags.serving import make, parse
from bench.serving.behind import LINE, compare, without_long
from bench.serving.engines import ANY_VOCAB, load_model
from bench.serving.report import write_report
from bench.serving.results import outcome_of, print_outcome
from bench.serving.session import Session, describe, trace_of
from bench.serving.trace import write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 130 after Ctrl-C; mistakes exit with 2."""
    parser, args = make(), parse(argv)
    try:
        if args.report is not None:
            args.report.mkdir(parents=True, exist_ok=True)
        model, vocab_size = (None, ANY_VOCAB) if args.model is None else load_model(args.model)
        trace = trace_of(args, vocab_size)
        if args.write_trace is not None:
            write_trace(args.write_trace, trace)
        session = Session(args, model, trace)
        alone = Session(args, model, without_long(trace)) if args.preset == BEHIND else None
        about = describe(args, model, trace)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted: nothing was measured", file=sys.stderr)
        return INTERRUPTED
    is_partial = False
    try:
        session.measure()
        if alone is not None:
            alone.measure()
    except KeyboardInterrupt:
        is_partial = True
    outcome = outcome_of(session, about, is_partial=is_partial)
    if alone is not None and not is_partial:
        found = compare(session.runs, alone.runs)
        print(*(LINE.format(name, **row) for name, row in found.items()), "", sep="\n")
        outcome[BEHIND.replace("-", "_")] = found
    print_outcome(outcome)
    if args.report is not None:
        write_report(args.report, outcome, session.runs)
        print(f"report: {args.report / 'index.html'}", file=sys.stderr)
    return INTERRUPTED if is_partial else 0


if __name__ == "__main__":
    sys.exit(main())
