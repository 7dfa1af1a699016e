"""``mlx_paged kv_disk``: lists, verifies and trims a directory of --kv-disk."""

from collections.abc import Sequence

from mlx_paged.starting import start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 if damage was found; mistakes exit with 2."""
    from pathlib import Path

    from mlx_paged.cli import MEMORY_OR_NONE, Parser

    parser = Parser(
        "mlx_paged.kv_disk",
        "python -m mlx_paged.kv_disk DIR [options]",
        description="List, verify or trim a directory of stored K/V.",
    )
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="directory that was given to --kv-disk"
    )
    verify = "read all records and remove the damaged records"
    parser.add_argument("--verify", action="store_true", help=verify)
    trim = "remove the least recently used packs until the directory has at most GB"
    parser.add_argument("--trim", type=MEMORY_OR_NONE, metavar="GB", help=trim)
    args = parser.parse_args(argv)
    parser.require_versions()
    from mlx_paged.kv_disk.command import run

    try:
        return run(args)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    start(main)
