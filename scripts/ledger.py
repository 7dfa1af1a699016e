"""Whether what an engine says that it holds adds up to what the process has, under load.

    python -m scripts.ledger DIR

Computes waves of requests on a model and reads the ledger between steps: three of four requests
have an adapter, and one of four pins its K/V. Prints each account, and exits with 1 if a sum is
more than 5 % away from what the system says.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.adapters import random_factors
from mlx_paged import Engine
from mlx_paged.loading import load_model

WAVES = 4
REQUESTS = 16  # in a wave, of 50 to 400 prompt tokens and 16 outputs each
EVERY = 16  # steps between two accounts
RANK = 16  # of each adapter
MOST = 0.05


def accounts(
    engine: Engine,
    vocabulary: int,
    waves: int = WAVES,
    every: int = EVERY,
    adapters: Sequence[str | None] = (None,),
) -> Iterator[dict[str, Any]]:
    """The accounts of an engine under load: in waves of random requests that have these adapters by
    turns, and between waves."""
    rng = np.random.default_rng(0)
    for _ in range(waves):
        for i, length in enumerate(rng.integers(50, 400, REQUESTS)):
            prompt = rng.integers(0, vocabulary, length).tolist()
            options: dict[str, Any] = {"retain": "pin"} if i % 4 == 0 else {}
            options["adapter"] = adapters[i % len(adapters)]
            engine.add_request(prompt, max_tokens=16, temperature=0.0, **options)
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
            if steps % every == 0:
                yield engine.metrics()["memory"]
        yield engine.metrics()["memory"]


def deviation(account: dict[str, Any]) -> float:
    """The sum's relative distance from what the process has; below 0: something is missing."""
    return float(account["sum_bytes"] / account["process_bytes"] - 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="DIR")
    args = parser.parse_args(argv)
    model, tokenizer = load_model(args.model)[:2]
    engine, adapters, worst = Engine(model, tokenizer, adapters={}), ["a", "b", "c", None], 0.0
    for seed, name in enumerate(adapters[:-1]):
        assert name is not None
        engine.update_adapter(name, random_factors(model, RANK, seed), scale=1.0)
    for account in accounts(engine, len(tokenizer.get_vocab()), adapters=adapters):
        held = {name: round(line["bytes"] / 1e6, 1) for name, line in account["held"].items()}
        found = deviation(account)
        print(f"{held} MB: {account['sum_bytes'] / 1e6:.1f}", end=" ")
        print(f"of {account['process_bytes'] / 1e6:.1f} MB, {100 * found:+.2f} %", flush=True)
        worst = max(worst, abs(found))
    print(f"at most {100 * worst:.2f} % away")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
