"""``mlx_paged run``: a program of mlx-lm on paged caches.

The program, and Python programs that it starts, run under the patch. The program takes the place of
this process. PYTHONPATH names a folder whose ``sitecustomize.py`` patches mlx-lm; child processes
inherit that.
"""

import json
import os
import re
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from mlx_paged.arguments import UntestedVersionError
from mlx_paged.cli import COUNT, MEMORY, Parser
from mlx_paged.options import BLOCK_SIZE
from mlx_paged.starting import start

STARTUP = str(Path(__file__).parent / "drop_in" / "startup")


def main() -> int:
    """Replace this process by the program. A mistake gives one line and exit status 2."""
    usage = "%(prog)s [options] SCRIPT | -m MODULE | COMMAND [arguments]"
    parser = Parser("mlx_paged.run", usage)
    block = "tokens per KV block"
    parser.add_argument("--block-size", type=COUNT, default=BLOCK_SIZE, metavar="N", help=block)
    bound = "GB of the KV pool of each model and thread (default: what the device can spare)"
    parser.add_argument("--kv-memory", type=MEMORY, metavar="GB", help=bound)
    cache = "GB of freed buffers that MLX keeps on a GPU (default: MLX's limit)"
    parser.add_argument("--cache-limit", type=MEMORY, metavar="GB", help=cache)
    own, program = _divided(sys.argv[1:])
    args = parser.parse_args(own)
    parser.require_versions()
    try:
        program = _for_python(program)
    except ValueError as error:
        parser.error(str(error))
    from mlx_paged.drop_in.patch import patch_mlx_lm

    options = {"block_size": args.block_size, "kv_memory": args.kv_memory}
    try:
        patch_mlx_lm(**options)  # it finds mistakes in the options before the program starts
    except (ValueError, UntestedVersionError) as error:
        parser.error(str(error))
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error("python got -E, -I or -S: expected none of them, as they prevent the patch")
    same = [sys.prefix, sys.implementation.cache_tag]
    given = {"python": same, "options": options, "cache_limit": args.cache_limit}
    os.environ["MLX_PAGED_RUN"] = json.dumps(given)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STARTUP, os.getenv("PYTHONPATH"))))
    flags = sys.orig_argv[1 : -len(sys.argv) - 1]  # before "-m mlx_paged.run"
    os.execv(sys.executable, [sys.executable, *flags, *program])


def _divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """This command's own options; the program and its arguments."""
    end = 0
    while end < len(argv) and argv[end].startswith("-") and argv[end] != "-m":
        end += 1 if "=" in argv[end] or argv[end] in ("-h", "--help") else 2
    return argv[:end], argv[end:]


def _for_python(program: list[str]) -> list[str]:
    """The program as arguments of Python. Raises ValueError if there is no such program."""
    name, *arguments = program or [""]
    if Path("".join(arguments[:1]) if name == "-m" else name).name.split(".")[0] == "mlx_vlm":
        raise ValueError("mlx_vlm has caches of its own, to which the patch does nothing")
    if name == "-m":
        if not _spec(module := "".join(arguments[:1])):
            raise ValueError(f"argument -m: expected a Python module, got {module!r}")
        return program
    if Path(name).is_file():
        return program
    folders = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
    file = None if os.sep in name else which(name, path=folders)
    # A command begins with a line for Python, or with two for sh, which starts Python.
    if file and re.match(rb"#!.*\n?.*python", Path(file).read_bytes()):
        return [file, *arguments]
    if name and Path(name, "__main__.py").is_file():
        return program
    raise ValueError(f"argument SCRIPT or COMMAND: expected a file or Python command, got {name!r}")


def _spec(module: str) -> ModuleSpec | None:
    """What Python would run; found without an import of the packages around it."""
    package = module.rpartition(".")[0]
    if not package:
        return find_spec(module) if module.isidentifier() else None
    parent = _spec(package)
    return parent and PathFinder.find_spec(module, parent.submodule_search_locations or [])


if __name__ == "__main__":
    start(main)
