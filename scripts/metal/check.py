"""Checks the Metal sources and launches for what Apple's compiler and MLX's encoder refuse.

    python -m scripts.metal.check [--one-in N --seed TEXT] [--language VERSION] [PATH ...]

Without paths it checks every launch that an engine can reach (scripts/metal/reachable.py) and the
source of each; with --one-in those of one in N kinds of layers, which the seed chooses. Paths are
sources as MLX gets them, as scripts.metal.sources writes them, or folders of such files. Prints a
line for each finding, then the numbers of sources, plans and rules. Exits with 1 if there are
findings.
"""

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import mlx.core as mx

from mlx_paged.cli import COUNT
from scripts.metal.reachable import BLOCK_SIZES, architectures, kinds_of, reachable_calls
from scripts.metal.sources import DTYPES
from tests.metal_emulator.apple_rules import (
    LANGUAGES,
    RULES,
    Finding,
    check_call,
    check_source,
    split_instantiation,
)

TOGETHER = 64
"""Sources that differ only in their last line, the instantiation, are checked as one text with so
many such lines."""


def joined(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The texts to check, by the name of the first source in each."""
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    for name, source in sources.items():
        template, instantiation = split_instantiation(source)
        lines[template][name] = instantiation
    for template, instantiations in lines.items():
        names = list(instantiations)
        for start in range(0, len(names), TOGETHER):
            some = names[start : start + TOGETHER]
            text = "\n".join([template, *(instantiations[name] for name in some), ""])
            yield some[0], text


def check_sources(
    sources: Mapping[str, str], languages: Sequence[str] = LANGUAGES
) -> list[Finding]:
    """The findings in sources, by file name, in one of these versions of Metal."""
    return [
        found for name, text in joined(sources) for found in check_source(text, name, languages)
    ]


def check_reachable(
    dtypes: Sequence[mx.Dtype] = DTYPES,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    one_in: int = 1,
    seed: str = "",
    languages: Sequence[str] = LANGUAGES,
) -> tuple[list[Finding], str]:
    """The findings in all that an engine can reach, or in one of so many kinds of layers, and how
    much that is."""
    served = list(architectures())
    kinds = kinds_of(served)
    kinds = Random(seed).sample(sorted(kinds, key=repr), -(-len(kinds) // one_in))
    findings: set[Finding] = set()
    sources: dict[str, str] = {}
    pipelines: set[str] = set()
    num_plans = 0
    for call in reachable_calls(kinds, dtypes, block_sizes):
        findings.update(check_call(call))
        for launch in call["launches"]:
            num_plans += 1
            pipelines.add(launch["pipeline"])
            sources[f"{launch['kernel']}.metal"] = launch["source"]
    findings.update(check_sources(sources, languages))
    size = (
        f"{len(sources)} sources, {num_plans} plans of {len(pipelines)} pipelines for "
        f"{len(served)} architectures with {len(kinds)} kinds of layers"
    )
    return sorted(findings), size


def read_sources(paths: Iterable[Path]) -> dict[str, str]:
    """Texts by file name. A byte that is not UTF-8 becomes one that the rules refuse."""
    files = [file for path in paths for file in (path.glob("*.metal") if path.is_dir() else [path])]
    return {file.name: file.read_text(errors="surrogateescape") for file in sorted(files)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.metal.check", description=__doc__)
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH")
    parser.add_argument("--one-in", type=COUNT, default=1, metavar="N")
    parser.add_argument("--seed", default="", metavar="TEXT")
    parser.add_argument("--language", choices=LANGUAGES, help="of Metal; default: all of them")
    args = parser.parse_args()
    languages = LANGUAGES if args.language is None else (args.language,)
    mx.set_default_device(mx.Device(mx.cpu))
    gc.disable()  # millions of nodes without a cycle: each collection would visit them all
    if args.paths:
        sources = read_sources(args.paths)
        findings, size = check_sources(sources, languages), f"{len(sources)} sources"
    else:
        findings, size = check_reachable(one_in=args.one_in, seed=args.seed, languages=languages)
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings: {size}, {len(RULES)} rules, Metal {', '.join(languages)}")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
