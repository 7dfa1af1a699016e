"""``mlx_paged COMMAND`` and ``python -m mlx_paged COMMAND``: run a command, or list all."""

import runpy
import sys
from pathlib import Path

import mlx_paged
from mlx_paged.cli import Parser

COMMANDS = {
    "generate": "text for one prompt or for many at once",
    "server": "OpenAI's API and Anthropic's Messages API over HTTP",
    "run": "a program of mlx-lm on paged caches",
    "doctor": "checks of this installation and its device",
    "bench": "throughput, latency and memory, beside mlx-lm",
    "kv_disk": "lists, verifies and trims a directory of --kv-disk",
}
BENCHES = (
    *("serving", "stalls", "memory", "admission", "agent_trace"),
    *("paged_attention", "shared_prefixes", "host_cost"),
)
HOMES = Path(__file__).parent / "with_bench", Path(__file__).parents[1]
"""Where the folder `bench` is: in a wheel, in a clone."""


def main() -> None:
    """Run the command in this process; what follows its name is its own."""
    parser = Parser("mlx_paged", "mlx_paged COMMAND [options]", description=mlx_paged.__doc__)
    version = f"mlx_paged {mlx_paged.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", dest="name", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    name = parser.parse_args(_taken_argument()).name
    if name is None:
        parser.print_help()
        return
    module = _bench() if name == "bench" else f"mlx_paged.{name}"
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while it starts or ends; a program under `run` decides itself
        if name == "run":
            raise
        sys.exit(130)


def _bench() -> str:
    """The module of the bench that the next argument names."""
    parser = Parser("mlx_paged bench", "mlx_paged bench NAME [options]")
    parser.add_argument("name", choices=BENCHES, metavar="|".join(BENCHES))
    name = parser.parse_args(_taken_argument()).name
    sys.path.append(str(next(home for home in HOMES if (home / "bench").is_dir())))
    return f"bench.{name}"


def _taken_argument() -> list[str]:
    """The first argument, taken from what Python got; `run` reads that, too."""
    place, argument = 1 - len(sys.argv), sys.argv[1:2]
    if argument:
        del sys.argv[place], sys.orig_argv[place]
    return argument


if __name__ == "__main__":
    main()
