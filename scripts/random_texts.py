"""Compares the text of random tokens with what the tokenizer's own `decode` says.

    python -m scripts.random_texts [--count 1000000] [--seed 0] [DIR ...]

The sequences are divided among the tokenizers of tests/support/models/tokenizers.py and those of
the models in the directories.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_paged.cli import COUNT, COUNT_OR_NONE
from tests.support.models.tokenizers import KINDS, tokenizer_of
from tests.support.random_texts import expected_text, random_cases, streamed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="random_texts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=COUNT, default=1_000_000)
    parser.add_argument("--seed", type=COUNT_OR_NONE, default=0)
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path)
    args = parser.parse_args(argv)
    tokenizers = {kind: tokenizer_of(kind) for kind in KINDS}
    tokenizers |= {str(path): load_tokenizer(path) for path in args.directories}
    count, num_wrong = -(-args.count // len(tokenizers)), 0
    for name, tokenizer in tokenizers.items():
        wrong = [
            (prompt, tokens)
            for prompt, tokens in random_cases(tokenizer, f"{name} {args.seed}", count)
            if "".join(streamed(tokenizer, prompt, tokens))
            != expected_text(tokenizer, prompt, tokens)
        ]
        num_wrong += len(wrong)
        print(f"{name}: {count} sequences, {len(wrong)} wrong {wrong[:1] or ''}", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
