"""Arguments of ``python -m bench.serving``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.command import ABOVE_ZERO, add_rounds
from bench.models import REAL, SIZES
from bench.serving.engines import DEFAULT, ENGINES
from bench.serving.http_engine import APIS
from bench.serving.measures import Slo
from bench.serving.replay import Stall
from bench.serving.workload import PRESETS
from mlx_paged.cli import COUNT, FRACTION, KV_BLOCK_SIZES, Parser, number
from mlx_paged.options import Policy


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments that fit together; a mistake ends the process with status 2."""
    args = parser.parse_args(argv)
    if args.trace is not None and (args.request_rate is not None or args.requests is not None):
        parser.error("--trace: brings its own arrivals, without --request-rate and --requests")
    if args.trace is not None and args.tokens_target is not None:
        parser.error("--trace: brings its own requests, without --tokens-target")
    given = (args.trace, args.requests, args.tokens_target, args.request_rate)
    if PRESETS[args.preset].arrivals_s and (any(given) or args.closed_loop or args.max_rate):
        parser.error(f"--preset {args.preset}: brings its own requests and arrivals")
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
    if args.url is None and (args.api is not None or args.served_model is not None):
        parser.error("--api, --served-model: expected --url with them")
    if args.url is not None and (args.arrivals_by_step or args.inject_stall):
        parser.error("--url: a server has no steps for --arrivals-by-step and --inject-stall")
    if args.engines is None:
        args.engines = list(DEFAULT if args.url is None else ())
    if args.model is None and args.engines:
        args.model = PRESETS[args.preset].model
    args.engines += [url for url in args.url or () if url not in args.engines]
    return args


def add_arguments(parser: Parser) -> None:
    _add_work(parser.add_argument_group("workload").add_argument)
    _add_load(parser.add_argument_group("load"))
    _add_engines(parser)
    _add_output(parser.add_argument_group("measures and output").add_argument)


def _add_work(add: Callable[..., Any]) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    add("--preset", choices=PRESETS, default="uniform", help=presets)
    add("--requests", type=COUNT, metavar="N", help="default: the preset's number")
    target = "as many requests as N output tokens need"
    add("--tokens-target", type=COUNT, metavar="N", help=target)
    seed = number(int, 0, 2**63, "a whole number >= 0")
    add("--seed", type=seed, default=0, help="of the trace")
    add("--trace", type=Path, metavar="FILE.jsonl", help="replay these requests instead")
    add("--write-trace", type=Path, metavar="FILE.jsonl", help="write the trace, for --trace")
    models = f"demo, {', '.join(SIZES)} (random weights), {', '.join(REAL)} (a real chat model),"
    models += " or what mlx_lm.load takes"
    add("--model", help=f"{models} (default: the preset's)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add, loop = group.add_argument, group.add_mutually_exclusive_group().add_argument
    when_due = "requests come when they are due, whether or not others have ended (default)"
    loop("--open-loop", action="store_true", help=when_due)
    clients = "--target-active clients, each sending its next request when its last has ended"
    loop("--closed-loop", action="store_true", help=clients)
    rate = "requests a second on average (default: all are due at once)"
    add("--request-rate", type=ABOVE_ZERO, metavar="R", help=rate)
    shape = "of the gamma distributed gaps: 1 is Poisson, below 1 comes in bursts"
    add("--burstiness", type=ABOVE_ZERO, default=1.0, metavar="SHAPE", help=shape)
    active = "sequences that an engine runs side by side at most (default: %(default)s)"
    add("--target-active", type=COUNT, default=32, metavar="N", help=active)
    step = "time of a step on the run's clock: counts are then the same on every machine"
    add("--arrivals-by-step", type=ABOVE_ZERO, metavar="MS", help=step)


def _add_engines(parser: Parser) -> None:
    add = parser.add_argument_group("engines").add_argument
    names, default = f"some of {','.join(ENGINES)}", ",".join(DEFAULT)
    names += f" (default: {default})"
    add("--engines", type=_checked(_engines), metavar="NAMES", help=names)
    urls = "OpenAI-compatible servers, measured over HTTP; without --engines they are all"
    add("--url", type=_checked(_url), nargs="+", metavar="URL", help=urls)
    add("--api", choices=APIS, help="which one --url has (default: completions)")
    add("--served-model", metavar="NAME", help="for --url (default: the first of its list)")
    add_rounds(parser, 1)
    static = "skip the runs in static batches, which static_tokens_per_sec comes from"
    add("--no-static", dest="static", action="store_false", help=static)
    add("--prefill-chunk", type=COUNT, default=512, metavar="TOKENS")
    add("--kv-block-size", type=int, choices=KV_BLOCK_SIZES, default=16, help="of mlx_paged")
    add("--kv-bits", metavar="8|6|4", help="of mlx_paged")
    blocks = "of mlx_paged's pool (default: so many that no request is preempted)"
    add("--num-blocks", type=COUNT, metavar="N", help=blocks)
    add("--max-stall-ms", type=ABOVE_ZERO, metavar="MS", help="of mlx_paged")
    policies = [str(policy) for policy in Policy]
    policy = "which prompt mlx_paged computes next (default: %(default)s)"
    add("--policy", choices=policies, default=str(Policy.FCFS), help=policy)
    add("--no-prefix-cache", action="store_true", help="of mlx_paged")


def _add_output(add: Callable[..., Any]) -> None:
    slo = "limits that a stream must keep to count for goodput; also tpot"
    add("--slo", type=_checked(Slo.parse), metavar="ttft=MS,itl=MS", help=slo)
    add("--max-rate", action="store_true", help="search the highest rate that keeps --slo")
    part = "part of the streams that must keep --slo there (default: %(default)s)"
    add("--attainment", type=FRACTION, default=0.9, help=part)
    spike = "of a tick (default: 5 medians of the run, at most 0.2)"
    add("--spike-threshold", type=ABOVE_ZERO, metavar="SECONDS", help=spike)
    add("--report", type=Path, metavar="DIR", help="write an HTML page with charts")
    stall = "sleep in this tick of every run, to check that the stall is found (for tests)"
    add("--inject-stall", type=_checked(Stall.parse), metavar="MS@TICK", help=stall)


def _checked(parse_text: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argument type that reports mistakes in the words of `parse_text`."""

    def convert(text: str) -> Any:
        try:
            return parse_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"expected http://HOST:PORT, got {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _engines(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"unknown engine {name!r}: expected some of {', '.join(ENGINES)}")
    return list(dict.fromkeys(names))
