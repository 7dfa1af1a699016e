"""An agent's loop: a schema makes every turn a tool's call: python examples/agent.py [MODEL]

It needs llguidance: pip install '.[structured]'.
"""

import json
import sys

from mlx_lm import load

from mlx_paged import Engine, demo_model_path

FILES = {"main.py": "print('hello')", "notes.txt": "nothing to do"}
TOOLS = {
    "list_files": lambda name: " ".join(FILES),
    "read_file": lambda name: FILES.get(name, f"{name}: no such file"),
}
CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": [*TOOLS, "finish"]},
        "argument": {"enum": ["", *FILES]},
    },
    "required": ["tool", "argument"],
    "additionalProperties": False,
}
SEED = 42  # with it the demo model, which follows no task, happens to take three turns
TASK = "Tools: list_files, read_file, finish. Call one in each turn. What does main.py print?\n"

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
engine = Engine(model, tokenizer)

text = TASK
for turn in range(1, 5):
    (completion,) = engine.generate(
        text + "call: ", json_schema=CALL, max_tokens=64, temperature=0.7, seed=SEED + turn
    )
    if completion.finish_reason != "stop":
        print(f"turn {turn}: the call is not complete: {completion.text!r}")
        break
    call = json.loads(completion.text)  # it follows the schema: nothing to check
    tool, argument = call["tool"], call["argument"]
    # Earlier turns are in the prefix cache: only the new words are computed.
    cached = f"{completion.cached_prompt_tokens} of {completion.prompt_tokens} tokens cached"
    print(f"turn {turn} ({cached}): {tool}({argument!r})")
    if tool == "finish":
        break
    text += f"call: {completion.text}\nresult: {TOOLS[tool](argument)}\n"
