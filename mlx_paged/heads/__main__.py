"""``mlx_paged head extract CHECKPOINT OUT``: writes the MTP head of a published checkpoint."""

from collections.abc import Sequence

from mlx_paged.starting import start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; mistakes exit with 2."""
    from pathlib import Path

    from mlx_paged.arguments import GB, one_line
    from mlx_paged.cli import Parser

    parser = Parser(
        "mlx_paged.heads",
        "python -m mlx_paged.heads extract CHECKPOINT OUT [options]",
        description="Write the MTP head of a checkpoint, which mlx-lm drops, to a file.",
    )
    parser.add_argument("action", choices=("extract",), metavar="extract")
    checkpoint = "folder of a checkpoint as it was published, with config.json"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=checkpoint)
    out = "file to write; its name ends with .safetensors"
    parser.add_argument("out", metavar="OUT", type=Path, help=out)
    bits = "quantize the head's matrices, in groups of 64"
    parser.add_argument("--bits", type=int, choices=(4, 8), metavar="4|8", help=bits)
    args = parser.parse_args(argv)
    if not args.checkpoint.is_dir():
        parser.error(f"{args.checkpoint}: no such directory")
    parser.require_versions()
    from mlx_paged.heads.mtp_files import extract

    try:
        head = extract(args.checkpoint, args.out, args.bits)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))
    size = args.out.stat().st_size / GB
    print(f"{args.out}: the head of a {head.model_type}, {size:.3f} GB")
    return 0


if __name__ == "__main__":
    start(main)
