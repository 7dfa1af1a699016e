"""A server whose model follows the script of an agent with a shell: the model writes a file with a
command, reads the file with another one, and says what it read."""

import json
from contextlib import AbstractContextManager
from typing import Any

from scripts.agents_model import SHELLS, following

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


def scripted() -> AbstractContextManager[str]:
    """The URL of a server whose answers are those of :func:`say`."""

    def script(model: Any, fields: dict[str, Any]) -> list[int]:
        tokens: list[int] = model.tokenizer.encode(say(fields), add_special_tokens=False)
        return tokens

    return following(script, "--chat-template", TEMPLATE)
