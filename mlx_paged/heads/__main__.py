"""``mlx_paged head``: extracts the MTP head of a checkpoint, which guesses tokens.

``mlx_paged head extract CHECKPOINT OUT`` writes that head, or an EAGLE-3 head with quantized
matrices.
"""

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
        description="Write the MTP head of a checkpoint, which mlx-lm drops, to a file, or an"
        " EAGLE-3 head with quantized matrices to a folder.",
    )
    parser.add_argument("action", choices=("extract",), metavar="extract")
    checkpoint = "folder of a checkpoint or an EAGLE-3 head as published, with config.json"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=checkpoint)
    out = "file to write, whose name ends with .safetensors; of an EAGLE-3 head the folder"
    parser.add_argument("out", metavar="OUT", type=Path, help=out)
    bits = "quantize the head's matrices, in groups of 64"
    parser.add_argument("--bits", type=int, choices=(4, 8), metavar="4|8", help=bits)
    args = parser.parse_args(argv)
    if not args.checkpoint.is_dir():
        parser.error(f"{args.checkpoint}: no such directory")
    parser.require_versions()
    from mlx_paged.heads.eagle3_files import is_eagle3, quantize_eagle3, read_config
    from mlx_paged.heads.mtp_files import extract

    try:
        if is_eagle3(read_config(args.checkpoint / "config.json")):
            if args.bits is None:
                parser.error("an EAGLE-3 head is used as it is: expected --bits 4 or --bits 8")
            quantize_eagle3(args.checkpoint, args.out, args.bits)
            print(f"{args.out}: an EAGLE-3 head of {args.bits} bits")
            return 0
        head = extract(args.checkpoint, args.out, args.bits)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))
    size = args.out.stat().st_size / GB
    print(f"{args.out}: the head of a {head.model_type}, {size:.3f} GB")
    return 0


if __name__ == "__main__":
    start(main)
