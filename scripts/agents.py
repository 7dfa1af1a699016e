"""Runs clients of agents from npm and PyPI against a server whose model follows a script: each one
writes files with tools, turn after turn, in three formats of tool calls; the files are compared
with what the model wrote.

    npm install --prefix DIR @anthropic-ai/claude-code @openai/codex \\
        opencode-ai @qwen-code/qwen-code
    python -m venv DIR/python && DIR/python/bin/pip install openai-agents
    unshare -rn sh -c 'ip link set lo up; python -m scripts.agents DIR'

Nothing but loopback is needed. A client that is not there is listed as not installed. The exit
status is 1 if one failed or if none is there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.agents_model import ENDED, FORMATS, MODEL, Task, scripted

TASK = "Write files with the tools that you have, until all of them are written."
TIMEOUT_S = 300
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
NPM = "node_modules/.bin"
PYTHON = "python/bin/python"
WRITES = ["-P", str(Path(__file__).with_name("openai_agents_writes.py"))]
CLIENTS = {
    "codex": [
        f"{NPM}/codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        TASK,
    ],
    "qwen-code": [f"{NPM}/qwen", "-p", TASK, "--yolo", "--auth-type", "openai"],
    "openai-agents chat": [PYTHON, *WRITES, "chat", "@URL@", MODEL, "@TURNS@", TASK],
    "openai-agents responses": [PYTHON, *WRITES, "responses", "@URL@", MODEL, "@TURNS@", TASK],
    "opencode": [f"{NPM}/opencode", "run", "--model", f"local/{MODEL}", TASK],
    "claude-code": [f"{NPM}/claude", "-p", TASK, "--permission-mode", "bypassPermissions"],
}
"""Commands of the clients; the program's path is relative to the folder of all."""


def version(folder: Path, client: str) -> str | None:
    """The version of a client, None if it is not installed."""
    program = folder / CLIENTS[client][0]
    told = ["--version"]
    if client.startswith("openai-agents"):
        told = ["-c", "from importlib import metadata as m; print(m.version('openai-agents'))"]
    if not program.exists():
        return None
    done = subprocess.run([program, *told], capture_output=True, text=True)
    numbers = re.findall(r"\d+(?:\.\d+)+", done.stdout)
    return str(numbers[0]) if done.returncode == 0 and numbers else None


def environment(client: str, home: Path, work: Path, url: str) -> dict[str, str]:
    """The variables of a client, whose settings are written below `home`."""
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(CODEX.replace("@URL@", url))
    own = {"HOME": str(home), "IS_SANDBOX": "1", "XDG_CONFIG_HOME": str(home / ".config")}
    own |= {"CODEX_HOME": str(home / ".codex"), "PWD": str(work)}
    own |= {"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE).replace("@URL@", url)}
    if client != "opencode":  # which would take Anthropic's model
        own |= {"ANTHROPIC_BASE_URL": url, "OPENAI_BASE_URL": f"{url}/v1"}
        for api in ("ANTHROPIC", "OPENAI"):
            own |= {f"{api}_API_KEY": "none", f"{api}_MODEL": MODEL}
    return os.environ | own


def differences(task: Task) -> list[str]:
    """Names of the files that are not byte for byte what the model wrote."""
    found = {path.name: path.read_bytes() for path in task.folder.glob("*.txt")}
    wanted = {name: text.encode() for name, text in task.wanted().items()}
    return sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))


def run(folder: Path, client: str, url: str, task: Task) -> tuple[bool, str]:
    """Whether a client came to its end, and what the client printed."""
    program, *options = CLIENTS[client]
    filled = [o.replace("@URL@", url).replace("@TURNS@", str(task.num_turns)) for o in options]
    with tempfile.TemporaryDirectory(dir=os.environ.get("HOME")) as home:
        variables = environment(client, Path(home, "home"), task.folder, url)
        subprocess.run(["git", "init", "-q", task.folder], check=True)
        where: dict[str, Any] = {"cwd": task.folder, "env": variables, "text": True}
        where |= {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": TIMEOUT_S}
        try:
            done = subprocess.run([folder / program, *filled], **where)
        except subprocess.TimeoutExpired as error:
            return False, f"no end within {TIMEOUT_S} s: {error.stdout!r} {error.stderr!r}"
        return done.returncode == 0 and ENDED in done.stdout, done.stdout + done.stderr


def checked(
    folder: Path, client: str, written: str, url: str, tasks: list[Task], turns: int
) -> str:
    """The row of a client in a format, with what failed."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("HOME")) as place:
        task = Task(Path(place), turns)
        tasks.append(task)
        is_ended, printed = run(folder, client, url, task)
        wrong = differences(task)
    count = task.num_results
    is_whole = is_ended and not wrong and count == turns * task.num_calls
    equal = f"{len(task.wanted()) - len(wrong)} of {len(task.wanted())}"
    if not is_whole:
        print(f"== {client}, {written}: ended {is_ended}, differ {wrong}\n{printed}\n", flush=True)
    result = "yes" if is_whole else "NO"
    return f"| {client} | {written} | {count // task.num_calls} | {count} | {equal} | {result} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the clients, with python/ inside")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=[*CLIENTS])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--turns", type=int, default=20, help="turns with calls (default: 20)")
    options = parser.parse_args()
    folder = options.folder.absolute()
    versions = {client: version(folder, client) for client in options.clients}
    found = [client for client, told in versions.items() if told]
    rows = ["| client | format | turns | calls | files equal | done |", "|---|---|---|---|---|---|"]
    rows += [f"| {client} | not installed | | | | |" for client in versions if client not in found]
    for written in options.formats:
        tasks: list[Task] = []
        with scripted(FORMATS[written], tasks) as url:
            for client in found:
                row = checked(folder, client, written, url, tasks, options.turns)
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    print("\n".join(rows))
    failed = sum(row.endswith("| NO |") for row in rows)
    print(json.dumps({"versions": versions, "formats": options.formats, "failed": failed}))
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
