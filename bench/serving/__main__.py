"""Engines side by side under the same requests: throughput, latency, K/V memory.

    python -m bench.serving --preset reference --engines mlx_paged,mlx_lm --rounds 3
    python -m bench.serving --request-rate 8 --slo ttft=500ms,itl=100ms --max-rate --report out

Requests come when they are due, not when an engine has time for them. The last line is one JSON
object; docs/serving-bench.md says what each value means.
"""

import sys
from collections.abc import Sequence

from bench.serving.about import describe
from bench.serving.arguments import make_parser, parse
from bench.serving.loading import load_model
from bench.serving.measuring import measure
from bench.serving.report import check_report, write_report
from bench.serving.results import Rates, print_results, result, rows_of
from bench.serving.setup import session_of, trace_of
from bench.serving.trace_file import write_trace

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 130 after Ctrl-C; mistakes exit with 2."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    args = parse(parser, argv)
    try:
        if args.report is not None:
            check_report(args.report)
        model, vocab_size = load_model(args.model)
        trace = trace_of(args, vocab_size)
        if args.write_trace is not None:
            write_trace(args.write_trace, trace)
        session = session_of(args, model, trace)
        about = describe(args, model, trace)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted: nothing was measured", file=sys.stderr)
        return INTERRUPTED
    rates, is_partial = Rates(), False
    try:
        measure(args, session, trace, rates)
    except KeyboardInterrupt:
        is_partial = True
    rounds = rows_of(args.engines, session.runs, args.target_active, args.slo, args.spike_threshold)
    outcome = result(about, rounds, rates, is_partial=is_partial)
    print_results(outcome)
    if args.report is not None:
        write_report(args.report, outcome, session.runs)
        print(f"report: {args.report / 'index.html'}", file=sys.stderr)
    return INTERRUPTED if is_partial else 0


if __name__ == "__main__":
    sys.exit(main())
