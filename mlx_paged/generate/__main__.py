"""``mlx_paged generate``: text for one prompt or for many at once.

The text goes to stdout, everything else to stderr.
"""

from collections.abc import Sequence

from mlx_paged.starting import start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 if a prompt failed, or 130 after Ctrl-C; mistakes exit
    with 2."""
    from mlx_paged.arguments import one_line
    from mlx_paged.generate.flags import make_parser
    from mlx_paged.launched import rank

    parser = make_parser()
    args = parser.parse_args(argv)
    parser.require_versions()
    from mlx_paged.generate.given import given_prompts

    try:
        prompts = [] if rank() else given_prompts(args)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    from mlx_paged.generate.command import run

    return run(parser, args, prompts)


if __name__ == "__main__":
    start(main)
