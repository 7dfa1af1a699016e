"""Arguments of ``python -m bench.serving``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.models import SIZES
from bench.serving.engines import DEFAULT, ENGINES
from bench.serving.slo import Slo
from bench.serving.stall import Stall
from bench.serving.workload import PRESETS
from mlx_paged.common_args import COUNT, FRACTION, KV_BLOCK_SIZES, Parser, number
from mlx_paged.waiting_queue import Policy

ABOVE_ZERO = number(float, 1e-6, 1e9, "a number above 0")


def make_parser(description: str) -> Parser:
    parser = Parser(prog="bench.serving", description=description)
    _add_work(parser.add_argument_group("workload"))
    _add_load(parser.add_argument_group("load"))
    _add_engines(parser.add_argument_group("engines"))
    _add_output(parser.add_argument_group("measures and output"))
    return parser


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments that fit together; a mistake ends the process with status 2."""
    args = parser.parse_args(argv)
    if args.trace is not None and (args.request_rate is not None or args.requests is not None):
        parser.error("--trace: brings its own arrivals, without --request-rate and --requests")
    if args.trace is not None and args.tokens_target is not None:
        parser.error("--trace: brings its own requests, without --tokens-target")
    if args.requests is not None and args.tokens_target is not None:
        parser.error("--tokens-target: says how many requests there are, without --requests")
    if args.closed_loop and args.request_rate is not None:
        parser.error("--closed-loop: requests follow each other, without --request-rate")
    if args.burstiness != 1 and args.request_rate is None and not args.max_rate:
        parser.error("--burstiness: expected --request-rate or --max-rate with it")
    if args.max_rate and args.slo is None:
        parser.error("--max-rate: expected --slo with it")
    if args.max_rate and (args.trace is not None or args.closed_loop):
        parser.error("--max-rate: sets the rate, without --trace and --closed-loop")
    if args.model is None:
        args.model = PRESETS[args.preset].model
    return args


def _add_work(group: argparse._ArgumentGroup) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    group.add_argument("--preset", choices=PRESETS, default="uniform", help=presets)
    group.add_argument("--requests", type=COUNT, metavar="N", help="default: the preset's number")
    group.add_argument(
        "--tokens-target",
        type=COUNT,
        metavar="N",
        help="as many requests as it takes for N output tokens",
    )
    group.add_argument(
        "--seed", type=number(int, 0, 2**63, "a whole number >= 0"), default=0, help="of the trace"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE.jsonl", help="replay these requests instead"
    )
    group.add_argument(
        "--write-trace", type=Path, metavar="FILE.jsonl", help="write the trace, for --trace"
    )
    group.add_argument(
        "--model",
        help=f"demo, {', '.join(SIZES)} (random weights), or what mlx_lm.load takes"
        " (default: the preset's)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--open-loop",
        action="store_true",
        help="requests come when they are due, whatever became of others (default)",
    )
    loop.add_argument(
        "--closed-loop",
        action="store_true",
        help="--target-active clients, each sending its next request when its last has ended",
    )
    group.add_argument(
        "--request-rate",
        type=ABOVE_ZERO,
        metavar="R",
        help="requests a second on average (default: all are due at once)",
    )
    group.add_argument(
        "--burstiness",
        type=ABOVE_ZERO,
        default=1.0,
        metavar="SHAPE",
        help="of the gamma distributed gaps: 1 is Poisson, below 1 comes in bursts",
    )
    group.add_argument(
        "--target-active",
        type=COUNT,
        default=32,
        metavar="N",
        help="sequences that an engine runs side by side at most (default: %(default)s)",
    )
    group.add_argument(
        "--arrivals-by-step",
        type=ABOVE_ZERO,
        metavar="MS",
        help="time passes by MS with every step and not otherwise: times mean nothing, and no count"
        " depends on the machine",
    )


def _add_engines(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engines",
        type=_checked(_engines),
        default=list(DEFAULT),
        metavar="NAMES",
        help=f"some of {','.join(ENGINES)} (default: {','.join(DEFAULT)})",
    )
    group.add_argument("--rounds", type=COUNT, default=1, help="of which results are medians")
    group.add_argument(
        "--no-static",
        dest="static",
        action="store_false",
        help="skip the runs in static batches that static_tokens_per_sec comes from",
    )
    group.add_argument("--prefill-chunk", type=COUNT, default=512, metavar="TOKENS")
    group.add_argument(
        "--kv-block-size", type=int, choices=KV_BLOCK_SIZES, default=16, help="of mlx_paged"
    )
    group.add_argument(
        "--num-blocks",
        type=COUNT,
        metavar="N",
        help="of mlx_paged's pool (default: enough that nobody is preempted)",
    )
    group.add_argument("--max-stall-ms", type=ABOVE_ZERO, metavar="MS", help="of mlx_paged")
    group.add_argument(
        "--policy",
        choices=[str(policy) for policy in Policy],
        default=str(Policy.FCFS),
        help="whose prompt mlx_paged computes next (default: %(default)s)",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="of mlx_paged")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        type=_checked(Slo.parse),
        metavar="ttft=MS,itl=MS",
        help="limits that a stream must keep to count for goodput; also tpot",
    )
    group.add_argument(
        "--max-rate", action="store_true", help="search the highest rate that keeps --slo"
    )
    group.add_argument(
        "--attainment",
        type=FRACTION,
        default=0.9,
        help="part of the streams that must keep it there (default: %(default)s)",
    )
    group.add_argument(
        "--spike-threshold",
        type=ABOVE_ZERO,
        metavar="SECONDS",
        help="of a tick (default: 5 medians of the run, at most 0.2)",
    )
    group.add_argument("--report", type=Path, metavar="DIR", help="write a page with pictures")
    group.add_argument(
        "--inject-stall",
        type=_checked(Stall.parse),
        metavar="MS@TICK",
        help="hold up this tick of every run, to see that it is found (for tests)",
    )


def _checked(parse_text: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argument type whose mistakes are reported in the words of `parse_text`."""

    def convert(text: str) -> Any:
        try:
            return parse_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _engines(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"unknown engine {name!r}: expected some of {', '.join(ENGINES)}")
    return list(dict.fromkeys(names))
