"""Reads and checks what the command is given, before slow imports. Knows no mlx."""

import argparse
import os
from pathlib import Path

from mlx_paged.cli import check_flags
from mlx_paged.generate.flags import check_batch_flags
from mlx_paged.generate.prompts_file import PromptSpec, prompt_specs


def given_prompts(args: argparse.Namespace) -> list[PromptSpec]:
    """The prompts of the command line, then those of the prompts file. Raises ValueError for a
    wrong flag, folder, file or line that needs no mlx to be found."""
    _check_files(args)
    specs = prompt_specs(args)
    if any(spec.batch is not None for spec in specs):
        check_batch_flags(args)
    if args.best_of is not None and args.n > args.best_of:
        raise ValueError(f"--n is {args.n}: expected at most --best-of {args.best_of}")
    check_flags(args)
    for flag, path in written_files(args).items():  # before the work
        try:
            Path(path).open("a", encoding="utf-8").close()
        except OSError as error:
            reason = f"{error.strerror}: expected a file that can be written"
            raise ValueError(f"{flag} {path}: {reason}") from error
    return specs


def written_files(args: argparse.Namespace) -> dict[str, str]:
    """The files that the command writes, by their flags."""
    files = {
        "--output": args.output,
        "--stats-json": args.stats_json,
        "--metrics-jsonl": args.metrics_jsonl,
    }
    return {flag: path for flag, path in files.items() if path is not None}


def _check_files(args: argparse.Namespace) -> None:
    """Raise ValueError if a run would replace answers or prompts, or write two things to one
    file."""
    for flag in ("resume", "overwrite", "logprobs", "no_logprobs"):
        if getattr(args, flag) and args.output is None:
            raise ValueError(f"--{flag.replace('_', '-')} is given: expected --output beside it")
    for first, second in (("resume", "overwrite"), ("logprobs", "no_logprobs")):
        if getattr(args, first) and getattr(args, second):
            name = second.replace("_", "-")
            raise ValueError(f"--{first} is given beside --{name}: expected one of them")
    known = {} if args.prompts_file is None else {"--prompts-file": args.prompts_file}
    for flag, path in written_files(args).items():
        for other, there in known.items():
            if _is_one_file(path, there):
                raise ValueError(f"{flag} {path} is the file of {other}: expected another file")
        known[flag] = path
    if args.output is None or args.resume or args.overwrite:
        return
    file = Path(args.output)
    if file.is_file() and (size := file.stat().st_size):
        raise ValueError(
            f"--output {args.output} has {size} bytes: expected --resume, which keeps the answers,"
            " --overwrite, or another file"
        )


def _is_one_file(one: str, other: str) -> bool:
    """Whether two paths name one regular file, or will once it is there."""
    if os.path.realpath(one) == os.path.realpath(other):
        return not Path(one).exists() or Path(one).is_file()
    try:
        return os.path.samefile(one, other) and Path(one).is_file()
    except OSError:  # one of them is not there
        return False
