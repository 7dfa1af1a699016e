"""Runs requests with grammars on the demo model."""

from mlx_paged import Engine
from tests.support.commands.server_harness import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["def f(x):", "class A:\n", "import os\n", "# a comment about", "x = [1, 2]", "print("]


def make_engine(**options):
    return Engine(*demo(), **{"num_blocks": 256, "seed": 1, "prewarm": False} | options)


def run(engine, requests, during=lambda engine, step: None):
    """Completions by id; `during` is called after each step."""
    ids = [engine.add_request(prompt, **options) for prompt, options in requests]
    done, steps = {}, 0
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
        steps += 1
        during(engine, steps)
    return [done[request_id] for request_id in ids], done, steps
