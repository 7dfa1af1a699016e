"""Checks that finished outputs of random schemas validate.

    python -m scripts.random_schemas [--count 1000] [--seed 0]

The demo model draws a text for each schema of tests/support/random_schemas.py, 32 at a time.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from jsonschema import ValidationError, validate

from mlx_paged import Engine
from mlx_paged.cli import COUNT, COUNT_OR_NONE
from mlx_paged.loading import load_model
from tests.support.random_schemas import random_schema


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="random_schemas", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=COUNT, default=1000)
    parser.add_argument("--seed", type=COUNT_OR_NONE, default=0)
    args = parser.parse_args(argv)
    engine = Engine(*load_model(), num_blocks=700)
    schemas = {}
    for index in range(args.seed, args.seed + args.count):
        schema = random_schema(index)
        request_id = engine.add_request(
            "x = ", json_schema=schema, max_tokens=300, temperature=1.0, seed=index
        )
        schemas[request_id] = schema
    finished = wrong = 0
    while engine.has_work:
        for output in engine.step():
            done = output.completion
            if done is None:
                continue
            try:
                assert done.error is None, done.error
                if done.finish_reason == "stop":
                    validate(json.loads(done.text), schemas[done.request_id])
                    finished += 1
            except (ValueError, ValidationError, AssertionError) as error:
                wrong += 1
                print(schemas[done.request_id], done.text, error)
    print(f"{args.count} schemas, {finished} finished, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
