"""Runs coding agents from npm against a server whose model follows a script: each agent writes a
file with a tool, reads it with another call, and says what it read.

    npm install --prefix DIR @anthropic-ai/claude-code @openai/codex \\
        opencode-ai @qwen-code/qwen-code
    unshare -rn sh -c 'ip link set lo up; python -m scripts.agents DIR/node_modules/.bin'

The model is the demo model, which computes every token; only what it says is replaced. Nothing but
loopback is needed. Agents that are not there are left out. The exit status is 1 if one failed.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.protocol import prompts
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server import flags
from mlx_paged.server.__main__ import serving

TASK = "Write a file with a shell command, read it with another one, and tell me what it says."
TEXT = "made-by-an-agent"
TIMEOUT_S = 300
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHELLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
}
"""Tools of the agents that run a shell command, and their argument for it."""

MODEL = "agent"
CODEX = f"""model = "{MODEL}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "@URL@/v1"
wire_api = "responses"
"""
OPENCODE = {
    "model": f"local/{MODEL}",
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "@URL@/v1", "apiKey": "none"},
            "models": {MODEL: {}},
        }
    },
}
COMMANDS = {
    "claude": ["-p", TASK, "--permission-mode", "bypassPermissions"],
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
    "opencode": ["run", "--model", f"local/{MODEL}", TASK],
    "qwen": ["-p", TASK, "--yolo", "--auth-type", "openai"],
}


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


def run(name: str, program: Path, url: str) -> tuple[bool, str]:
    """Whether an agent did its task, and what it printed."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("HOME")) as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        work.mkdir()
        (home / ".codex").mkdir(parents=True)
        (home / ".codex" / "config.toml").write_text(CODEX.replace("@URL@", url))
        subprocess.run(["git", "init", "-q", work], check=True)
        own = {"HOME": str(home), "IS_SANDBOX": "1", "XDG_CONFIG_HOME": str(home / ".config")}
        own |= {"CODEX_HOME": str(home / ".codex"), "PWD": str(work)}
        own |= {"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE).replace("@URL@", url)}
        if name != "opencode":  # which would take Anthropic's model
            own |= {"ANTHROPIC_BASE_URL": url, "OPENAI_BASE_URL": f"{url}/v1"}
            for api in ("ANTHROPIC", "OPENAI"):
                own |= {f"{api}_API_KEY": "none", f"{api}_MODEL": MODEL}
        options: dict[str, Any] = {"cwd": work, "env": os.environ | own, "text": True}
        options |= {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": TIMEOUT_S}
        try:
            done = subprocess.run([program, *COMMANDS[name]], **options)
        except subprocess.TimeoutExpired as error:
            return False, f"no end within {TIMEOUT_S} s: {error.stdout!r} {error.stderr!r}"
        made = work / "made.txt"
        is_made = made.exists() and made.read_text() == f"{TEXT}\n"
        is_told = re.search(f"The file says: .*{TEXT}", done.stdout, re.DOTALL) is not None
        return done.returncode == 0 and is_made and is_told, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the agents' programs")
    folder = parser.parse_args().folder.resolve()
    found = {name: folder / name for name in COMMANDS if (folder / name).exists()}
    failed, rows = [], ["| agent | version | result |", "|---|---|---|"]
    with scripted() as url:
        for name, program in found.items():
            is_done, printed = run(name, program, url)
            result = "done" if is_done else "FAILED"
            print(f"== {name}: {result}\n{printed.strip()}\n", flush=True)
            failed += [] if is_done else [name]
            version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            rows.append(f"| {name} | {version.strip()} | {result} |")
    print("\n".join(rows))
    print(json.dumps({"agents": sorted(found), "failed": failed}))
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
