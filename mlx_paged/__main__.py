"""``mlx_paged COMMAND`` and ``python -m mlx_paged COMMAND``: run a command, or list all."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mlx_paged import interrupts
from mlx_paged.starting import exit_interrupted, exit_unread

PACKAGE = Path(__file__).parent

ABOUT = re.compile(r'"{3}``mlx_paged (?P<name>\w+)``: (?P<text>.+?)\.("{3})?$', re.MULTILINE)
"""The first line of a command's module."""

BENCHES = (
    *("serving", "stalls", "memory", "admission", "agent_trace"),
    *("paged_attention", "shared_prefixes", "retention", "fairness", "host_cost", "adapters"),
)


@dataclass(frozen=True)
class Command:
    """A command, as the list of all shows it."""

    name: str
    text: str  # what the command is for
    module: str = ""  # which runs as the command; "": what the next argument names


def all_commands() -> dict[str, Command]:
    """The commands by name: a folder with a ``__main__.py`` is one, whose first line says so."""
    found = [Command("bench", "throughput, latency and memory, beside mlx-lm")]
    for path in (*PACKAGE.glob("*/__main__.py"), PACKAGE / "run.py"):
        about = ABOUT.match(path.read_text())
        assert about is not None, f"{path}: the first line names no command"
        module = path.parent if path.stem == "__main__" else path.with_suffix("")
        found.append(Command(about["name"], about["text"], f"mlx_paged.{module.name}"))
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}


def main() -> None:
    """Run the command in this process; what follows its name is its own."""
    name = ""
    try:
        interrupts.raise_again()
        command = _command()
        if command is not None:
            name = command.name
            _run(command)
        sys.stdout.flush()
    except KeyboardInterrupt:  # while the command starts or ends
        exit_interrupted(0 if name == "server" else interrupts.INTERRUPTED)
    except BrokenPipeError:  # of a bench's table
        exit_unread()
        raise


def _command() -> Command | None:
    """The command; None if the user asked for none and got the list of all."""
    import mlx_paged
    from mlx_paged.cli import Parser

    parser = Parser("mlx_paged", "mlx_paged COMMAND [options]", description=mlx_paged.__doc__)
    version = f"mlx_paged {mlx_paged.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parsers = parser.add_subparsers(title="commands", dest="name", metavar="COMMAND")
    commands = all_commands()
    for command in commands.values():
        parsers.add_parser(command.name, help=command.text)
    name: str | None = parser.parse_args(_taken_argument()).name
    if name is None:
        parser.print_help()
        return None
    return commands[name]


def _run(command: Command) -> None:
    import runpy

    runpy.run_module(command.module or _bench(), run_name="__main__", alter_sys=True)


def _bench() -> str:
    """The module of the bench that the next argument names."""
    from importlib import import_module

    from mlx_paged import command_buffers
    from mlx_paged.cli import Parser

    parser = Parser("mlx_paged bench", "mlx_paged bench NAME [options]")
    parser.add_argument("name", choices=BENCHES, metavar="|".join(BENCHES))
    command_buffers.lengthen()
    name = parser.parse_args(_taken_argument()).name
    homes = PACKAGE / "with_bench", PACKAGE.parent  # in a wheel, in a clone
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
