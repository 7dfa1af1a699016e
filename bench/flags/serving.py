"""Arguments of ``mlx_paged bench serving``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.command import ABOVE_ZERO, add_rounds, make_parser
from bench.flags.engines import APIS, DEFAULT, ENGINES
from bench.flags.limits import Slo, Stall
from bench.flags.presets import PRESETS
from bench.names import REAL, SIZES
from mlx_paged.cli import COUNT, FRACTION, KV_BLOCK_SIZES, Parser, number
from mlx_paged.options import Policy

ABOUT = "Engines side by side under the same requests: throughput, latency, K/V memory."


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments that fit together; a mistake ends the process with status 2."""
    parser = make()
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


def make() -> Parser:
    """The parser of the bench."""
    parser = make_parser("serving", ABOUT)
    _add_work(parser.add_argument_group("workload").add_argument)
    _add_load(parser.add_argument_group("load"))
    _add_engines(parser)
    _add_output(parser.add_argument_group("measures and output").add_argument)
    return parser


def _add_work(add: Callable[..., Any]) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    add("--preset", choices=PRESETS, default="uniform", help=presets)
    add("--requests", type=COUNT, metavar="N", help="default: the preset's number")
    target = "send requests until they add up to N output tokens"
    add("--tokens-target", type=COUNT, metavar="N", help=target)
    seed = number(int, 0, 2**63, "a whole number >= 0")
    add("--seed", type=seed, default=0, help="seed of the workload")
    add("--trace", type=Path, metavar="FILE.jsonl", help="replay the requests in this file")
    add(
        "--write-trace",
        type=Path,
        metavar="FILE.jsonl",
        help="write the requests to this file, for --trace",
    )
    models = f"demo, {', '.join(SIZES)} (random weights), {', '.join(REAL)} (a real chat model),"
    models += " or what mlx_lm.load takes"
    add("--model", help=f"{models} (default: the preset's)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add, loop = group.add_argument, group.add_mutually_exclusive_group().add_argument
    when_due = "requests arrive at fixed times, independent of answers (default)"
    loop("--open-loop", action="store_true", help=when_due)
    clients = "--target-active clients; each sends its next request after its last answer"
    loop("--closed-loop", action="store_true", help=clients)
    rate = "mean requests per second (default: all requests arrive at time 0)"
    add("--request-rate", type=ABOVE_ZERO, metavar="R", help=rate)
    shape = "shape of the gamma distribution of arrival gaps: 1 is Poisson, below 1 is bursty"
    add("--burstiness", type=ABOVE_ZERO, default=1.0, metavar="SHAPE", help=shape)
    active = "maximum sequences in an engine's batch (default: %(default)s)"
    add("--target-active", type=COUNT, default=32, metavar="N", help=active)
    step = "simulated time of a step, so that counts do not depend on the machine"
    add("--arrivals-by-step", type=ABOVE_ZERO, metavar="MS", help=step)


def _add_engines(parser: Parser) -> None:
    add = parser.add_argument_group("engines").add_argument
    names, default = f"comma-separated, of {', '.join(ENGINES)}", ",".join(DEFAULT)
    names += f" (default: {default})"
    add("--engines", type=_checked(_engines), metavar="NAMES", help=names)
    urls = "measure these OpenAI-compatible servers over HTTP, and --engines if given"
    add("--url", type=_checked(_url), nargs="+", metavar="URL", help=urls)
    add("--api", choices=APIS, help="API of --url (default: completions)")
    add(
        "--served-model",
        metavar="NAME",
        help="model name for --url (default: the first in /v1/models)",
    )
    add_rounds(parser, 1)
    static = "skip the runs with static batches (static_tokens_per_sec)"
    add("--no-static", dest="static", action="store_false", help=static)
    chunk = "maximum prompt tokens in a step of mlx_paged"
    add("--prefill-chunk", type=COUNT, default=512, metavar="TOKENS", help=chunk)
    block = "tokens per KV block of mlx_paged"
    add("--kv-block-size", type=int, choices=KV_BLOCK_SIZES, default=16, help=block)
    add("--kv-bits", metavar="8|6|4", help="quantized K/V of mlx_paged")
    blocks = "blocks in mlx_paged's pool (default: enough to preempt no request)"
    add("--num-blocks", type=COUNT, metavar="N", help=blocks)
    stall = "upper limit for the time of a step of mlx_paged (default: no limit)"
    add("--max-stall-ms", type=ABOVE_ZERO, metavar="MS", help=stall)
    policies = [str(policy) for policy in Policy]
    policy = "order in which mlx_paged starts requests (default: %(default)s)"
    add("--policy", choices=policies, default=str(Policy.FCFS), help=policy)
    add("--no-prefix-cache", action="store_true", help="without mlx_paged's prefix cache")


def _add_output(add: Callable[..., Any]) -> None:
    slo = "latency limits (ttft, itl, tpot) of a stream that counts for goodput"
    add("--slo", type=_checked(Slo.parse), metavar="ttft=MS,itl=MS", help=slo)
    add(
        "--max-rate",
        action="store_true",
        help="search for the highest request rate that meets --slo",
    )
    part = "fraction of streams that must meet --slo, for --max-rate (default: %(default)s)"
    add("--attainment", type=FRACTION, default=0.9, help=part)
    spike = "report longer ticks as spikes (default: 5 times the median, at most 0.2)"
    add("--spike-threshold", type=ABOVE_ZERO, metavar="SECONDS", help=spike)
    add("--report", type=Path, metavar="DIR", help="write an HTML page with charts")
    stall = "sleep so long in this tick of every run (tests that stalls are found)"
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
