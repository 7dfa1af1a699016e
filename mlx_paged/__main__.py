"""``python -m mlx_paged COMMAND``: runs ``python -m mlx_paged.COMMAND``, or lists the commands."""

import runpy
import sys

import mlx_paged
from mlx_paged.cli import Parser

COMMANDS = {
    "generate": "text for one prompt or for many at once",
    "server": "OpenAI's API and Anthropic's Messages API over HTTP",
    "run": "a program of mlx-lm on paged caches",
    "doctor": "checks of this installation and its device",
    "kv_disk": "lists, verifies and trims a directory of --kv-disk",
}


def main() -> None:
    """Run the command in this process; what follows its name is its own."""
    usage = "python -m mlx_paged COMMAND [options]"
    parser = Parser("mlx_paged", usage, description=mlx_paged.__doc__)
    version = f"mlx_paged {mlx_paged.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", dest="name", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    name = parser.parse_args(sys.argv[1:2]).name
    if name is None:
        parser.print_help()
        return
    place = 1 - len(sys.argv)  # of the name; `run` reads what Python got, too
    del sys.argv[place], sys.orig_argv[place]
    runpy.run_module(f"mlx_paged.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
