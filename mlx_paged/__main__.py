"""``mlx_paged COMMAND`` and ``python -m mlx_paged COMMAND``: run a command, or list all."""

import sys

from mlx_paged.starting import INTERRUPTED, exit_interrupted, exit_unread

COMMANDS = {
    "generate": "text for one prompt or for many at once",
    "chat": "a chat with a model in this terminal",
    "server": "OpenAI's API and Anthropic's Messages API over HTTP",
    "run": "a program of mlx-lm on paged caches",
    "doctor": "checks of this installation and its device",
    "bench": "throughput, latency and memory, beside mlx-lm",
    "kv_disk": "lists, verifies and trims a directory of --kv-disk",
    "head": "extracts the MTP head of a checkpoint, which guesses tokens",
}
MODULES = {"chat": "mlx_paged.terminal", "head": "mlx_paged.heads"}
"""Of commands whose module has another name."""

BENCHES = (
    *("serving", "stalls", "memory", "admission", "agent_trace"),
    *("paged_attention", "shared_prefixes", "retention", "fairness", "host_cost", "adapters"),
)


def main() -> None:
    """Run the command in this process; what follows its name is its own."""
    name = ""
    try:
        name = _command()
        if name:
            _run(name)
        sys.stdout.flush()
    except KeyboardInterrupt:  # while the command starts or ends
        exit_interrupted(0 if name == "server" else INTERRUPTED)
    except BrokenPipeError:  # of a bench's table
        exit_unread()
        raise


def _command() -> str:
    """The name of the command; "" if the user asked for none and got the list of all."""
    import mlx_paged
    from mlx_paged.cli import Parser

    parser = Parser("mlx_paged", "mlx_paged COMMAND [options]", description=mlx_paged.__doc__)
    version = f"mlx_paged {mlx_paged.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", dest="name", metavar="COMMAND")
    for command, text in COMMANDS.items():
        commands.add_parser(command, help=text)
    name: str | None = parser.parse_args(_taken_argument()).name
    if name is None:
        parser.print_help()
    return name or ""


def _run(name: str) -> None:
    import runpy

    module = _bench() if name == "bench" else MODULES.get(name, f"mlx_paged.{name}")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _bench() -> str:
    """The module of the bench that the next argument names."""
    from importlib import import_module
    from pathlib import Path

    from mlx_paged import command_buffers
    from mlx_paged.cli import Parser

    parser = Parser("mlx_paged bench", "mlx_paged bench NAME [options]")
    parser.add_argument("name", choices=BENCHES, metavar="|".join(BENCHES))
    command_buffers.lengthen()
    name = parser.parse_args(_taken_argument()).name
    package = Path(__file__).parent
    homes = package / "with_bench", package.parent  # in a wheel, in a clone
    sys.path.append(str(next(home for home in homes if (home / "bench").is_dir())))
    import_module(f"bench.flags.{name}").parse(None)  # help and mistakes come before slow imports
    return f"bench.{name}"


def _taken_argument() -> list[str]:
    """The first argument, taken from what Python got; `run` reads that, too."""
    place, argument = 1 - len(sys.argv), sys.argv[1:2]
    if argument:
        del sys.argv[place], sys.orig_argv[place]
    return argument


if __name__ == "__main__":
    main()
