"""``mlx_paged chat``: a chat with a model in this terminal."""

from collections.abc import Sequence

from mlx_paged.starting import start


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the user leaves. Returns 0; mistakes exit with 2."""
    from mlx_paged.arguments import one_line
    from mlx_paged.terminal.flags import check, make_parser

    parser = make_parser()
    args = parser.parse_args(argv)
    parser.require_versions()
    try:
        check(args)
        from mlx_paged.terminal.session import run

        return run(args)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))


if __name__ == "__main__":
    start(main)
