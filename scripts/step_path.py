"""Which files one decode step visits: what a reader opens to follow it.

    python -m scripts.step_path [--rows N] [--no-compile] [--list]

Profiles one decode step of the demo model and prints how many files, functions, calls and moves it
takes. A move is two calls in a row in different files of the package; returns are not counted.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType

import mlx_paged
from mlx_paged import Engine
from mlx_paged.cli import COUNT
from mlx_paged.loading import load_model

PACKAGE = Path(mlx_paged.__file__).parent
WARM_UP = 8
"""Steps before the profiled ones: they compute the prompts and fill caches."""

PROFILED = 16
"""Steps of which the shortest path counts. A step that takes unusually long also records why, one
that fills a block registers it, and a token that occurs for the first time is spelled."""


class StepPath:
    """The calls of the package's functions, in order.

    Attributes:
        calls: file and function of each call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def follow(self, function: Callable[[], object]) -> None:
        """Run `function` and note what it calls on this thread."""
        sys.setprofile(self._note)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.calls.append((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def moves(self) -> Counter[tuple[str, str]]:
        """Moves from one file into another, by both files."""
        pairs = pairwise(file for file, _ in self.calls)
        return Counter((before, after) for before, after in pairs if before != after)

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(set(self.calls))} functions,"
            f" {len(self.calls)} calls, {self.moves.total()} moves"
        )


def decode_step(rows: int = 1, compile: bool = True) -> StepPath:
    """The path of a step in which each of `rows` requests decodes one token, by a compiled graph or
    by the model's own code."""
    model, tokenizer = load_model(None, None, False)
    engine = Engine(model, tokenizer, block_size=16, compile=compile)
    for row in range(rows):
        engine.add_request(f"def f{row}(x):", max_tokens=64)
    for _ in range(WARM_UP):
        engine.step()
    paths = [StepPath() for _ in range(PROFILED)]
    for path in paths:
        path.follow(engine.step)
    return min(paths, key=lambda path: path.moves.total())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="step_path", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=COUNT, default=1, help="requests that decode (default: 1)")
    text = "the model's own code runs, not a compiled graph"
    parser.add_argument("--no-compile", dest="compile", action="store_false", help=text)
    parser.add_argument("--list", action="store_true", help="print the moves by pairs of files")
    args = parser.parse_args(argv)
    path = decode_step(args.rows, args.compile)
    print(path)
    if args.list:
        for (before, after), count in path.moves.most_common():
            print(f"{count:4} {before} -> {after}")


if __name__ == "__main__":
    main()
