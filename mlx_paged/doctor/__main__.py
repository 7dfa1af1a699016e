"""``mlx_paged doctor``: checks of this installation and its device.

The page of results goes to stdout; progress, what is found first, and mistakes go to stderr.
"""

from collections.abc import Sequence

from mlx_paged.starting import start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks. Returns 0 if all is right, 1 if not; mistakes exit with 2."""
    from mlx_paged.doctor.flags import parse

    parser, args = parse(argv)
    parser.require_versions()
    from mlx_paged.doctor.command import run

    return run(parser, args)


if __name__ == "__main__":
    start(main)
