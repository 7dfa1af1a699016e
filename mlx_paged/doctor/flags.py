"""Arguments of ``python -m mlx_paged.doctor``. Knows no mlx."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mlx_paged import cli
from mlx_paged.arguments import did_you_mean, one_line
from mlx_paged.cli import Parser

CHECKS = {
    "machine": "versions, the device, the path of attention",
    "common": "the kernels of the demo model and of common ones; tokens of a bfloat16 model",
    "kernels": "every variant of the kernels against float64",
    "sources": "the Metal sources, compiled where there is Xcode",
    "products": "MLX's own products, attention and transforms against float64",
    "tokens": "tokens of the engine against mlx-lm's, on the demo model",
    "acceptance": "guessed tokens that are right; tokens with them against mlx-lm's",
    "order": "reads and writes of a pool in a busy engine against a calm run",
    "memory": "memory before, during and after mixed steps, against the promised budget",
    "speed": "decode bandwidth and the host's time",
}
"""What each check compares or measures, by its name."""

STEP = "step"
"""A decode step with the command buffers of this process; the check `speed` has it run apart."""

OF_A_MODEL = "acceptance"
"""The check that takes a model and the flags of an engine."""

KINDS = (
    *("decode", "chunk", "split", "write", "quantized-write", "copy", "quantized-copy"),
    "simplest",
)
"""What a variant is one of: each kind has kernels of its own."""


def make_parser() -> Parser:
    parser = Parser(
        "mlx_paged.doctor",
        description="Checks an installation and its device; prints a page for an issue.",
    )
    parser.add_argument("--quick", action="store_true", help="check a sample, in a minute or a few")
    parser.add_argument("--json", metavar="FILE", help="also write all findings to this file")
    texts = "; ".join(f"{name}: {text}" for name, text in CHECKS.items())
    kinds = f"one kind of variants ({', '.join(KINDS)})"
    only = f"one check ({texts}), {kinds}, or one variant of a kernel as the page names it"
    parser.add_argument("--only", metavar="NAME", help=only)
    group = f"a model and its engine, beside --only {OF_A_MODEL}"
    cli.add_groups(parser, {group: (*cli.MODEL, *cli.engine_flags())})
    return parser


def parse(argv: Sequence[str] | None) -> tuple[Parser, Namespace]:
    """The parser and its arguments. A name that is none of a check, a kind or a variant, or a file
    that cannot be written, gives one line and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.only is not None and args.only not in (*CHECKS, *KINDS, STEP) and "-" not in args.only:
        parser.error(unknown(args.only))
    try:
        _check_model(parser, args)
    except ValueError as error:
        parser.error(one_line(error))
    if args.json is not None:
        try:
            Path(args.json).open("a", encoding="utf-8").close()
        except OSError as error:
            parser.error(f"argument --json: {one_line(error)}")
    return parser, args


def _check_model(parser: Parser, args: Namespace) -> None:
    """Raise ValueError if the flags of a model stand beside other checks, or do not fit."""
    own = {"quick", "json", "only"}
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    given = [f"--{name.replace('_', '-')}" for name in given if name not in own]
    if args.only != OF_A_MODEL and given:
        raise ValueError(f"{given[0]} is given: expected --only {OF_A_MODEL} beside it")
    if args.model is None and given:
        raise ValueError(f"{given[0]} is given: expected --model beside it")
    cli.check_flags(args)


def unknown(name: str) -> str:
    """What is wrong with a name that --only does not know."""
    expected = f"{', '.join(CHECKS)}, {', '.join(KINDS)} or a variant"
    return f"argument --only: expected {expected}, got {name!r}{did_you_mean(name, CHECKS)}"
