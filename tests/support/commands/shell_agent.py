"""A server whose model follows the script of an agent with a shell: the model writes a file with a
command, reads the file with another one, and says what it read."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_paged.protocol import prompts
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server import flags
from mlx_paged.server.__main__ import serving
from scripts.agents_model import MODEL, SHELLS

TEXT = "made-by-an-agent"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def say(fields: dict[str, Any]) -> str:
    """The script: what the model says to a request."""
    results = [m["content"] for m in fields["messages"] if m["role"] == "tool"]
    offered = {tool["function"]["name"]: tool["function"] for tool in fields["tools"]}
    shell = next((name for name in SHELLS if name in offered), None)
    if shell is None or len(results) > 1:
        return f"The file says: {results[-1]}" if results else "A title"
    arguments: dict[str, Any] = {
        SHELLS[shell]: [f"echo {TEXT} > made.txt", "cat made.txt"][len(results)]
    }
    for name in offered[shell]["parameters"].get("required", ()):
        arguments.setdefault(name, False if name == "is_background" else "a step of the task")
    return f"<tool_call>\n{json.dumps({'name': shell, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted() -> Iterator[str]:
    """The URL of a server whose answers are those of :func:`say`."""
    sampling = prompts.sampling

    def forced(model: Any, prompt: Any, fields: dict[str, Any], args: Any) -> SamplingParams:
        params, first = sampling(model, prompt, fields, args), len(prompt.tokens)
        ends = sorted(model.tokenizer.eos_token_ids)[:1]
        script = [*model.tokenizer.encode(say(fields), add_special_tokens=False), *ends]

        def choose(tokens: mx.array, logits: mx.array) -> mx.array:
            token = script[min(tokens.size - first, len(script) - 1)]
            chosen = mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)
            return chosen[None].astype(logits.dtype)

        return dataclasses.replace(params, logits_processors=(choose,))

    options = ["--chat-template", TEMPLATE, "--max-context", "131072", "--kv-memory", "0.6"]
    options += ["--port", "0", "--served-model-name", MODEL, "--max-models", "0"]
    prompts.sampling = forced
    try:
        with serving(flags.parse(options)) as server:
            thread = threading.Thread(target=server.run)
            thread.start()
            yield f"http://127.0.0.1:{server.address[1]}"
            server.should_exit = True
            thread.join()
    finally:
        prompts.sampling = sampling
