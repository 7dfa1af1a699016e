"""Parts of grammars for llguidance."""

import json
from typing import Any

from mlx_paged.sampling_params import JSON_STYLE

EMPTY = {"type": "object", "properties": {}}
"""The schema of a function that declares no parameters."""


def json_rule(schema: Any) -> str:
    """A JSON schema inside a grammar."""
    schema = EMPTY if schema is None or schema == {} else schema
    schema = {"x-guidance": JSON_STYLE} | schema if isinstance(schema, dict) else schema
    return f"%json {json.dumps(schema)}"
