"""What workloads share. Each gets a model's folder, a folder of its own and a file for results.

Each result is one line of JSON. The runner compares the lines of the stock and the patched run.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

MODEL, WORK, RESULTS = map(Path, sys.argv[1:4])
SCRIPTS = Path(sys.executable).parent
TIMEOUT = 240
PROMPTS = (
    "def main():\n    ",
    "class Node:\n    def __init__(self, ",
    "import os\n\n\ndef read(path):",
)
MESSAGES = [{"role": "user", "content": "write a class"}]


def show(name: str, value: Any) -> None:
    """Write a result: text, numbers, arrays, and lists and dictionaries of them."""
    with RESULTS.open("a") as file:
        file.write(json.dumps({"name": name, "value": _plain(value)}) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return {"shape": value.shape, "dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def attempt(name: str, work: Any, *args: Any, **options: Any) -> Any:
    """Call one function of the package and show what it returns, or the error that it raises."""
    try:
        value = work(*args, **options)
    except Exception as error:
        show(name, {"error": f"{type(error).__name__}: {error}"[:300]})
        return None
    show(name, value)
    return value


def command(name: str, *argv: str | Path, stdin: str = "") -> str:
    """Run a console script of the environment. Its times and speeds are left out of the result."""
    run = subprocess.run(
        [SCRIPTS / argv[0], *argv[1:]],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=WORK,
    )
    output = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", run.stdout)  # colours and cursor moves
    output = re.sub(r" *\d+\.\d+(e-?\d+)?", " #", output)
    output = re.sub(r"(per second:) *\d+", r"\1 #", output)
    output = re.sub(r" *\d+( +#k)", r" #\1", output)  # tokens per second in mlx_lm.lora's table
    output = re.sub(r" +$", "", output, flags=re.M)  # as wide as the speeds were
    output = output.replace(str(WORK), "WORK")
    if run.returncode:
        show(name, {"error": run.stderr[-300:], "status": run.returncode, "output": output})
    else:
        show(name, output)
    return run.stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def server(path: str, *argv: str | Path, port: int) -> Iterator[str]:
    """A server of the package, from when it answers on `path`. Its log is server.log."""
    with (WORK / "server.log").open("w") as log:
        process = subprocess.Popen([SCRIPTS / argv[0], *argv[1:]], stdout=log, stderr=log, cwd=WORK)
        url = f"http://127.0.0.1:{port}"
        try:
            _await(url + path, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {(WORK / 'server.log').read_text()[-600:]}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"no answer: {(WORK / 'server.log').read_text()[-600:]}")


def post(url: str, body: dict[str, Any]) -> Any:
    """The answer to a request, without what is different in each run."""
    headers = {"Content-Type": "application/json", "x-api-key": "none"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return {"error": f"{error.code} {error.read().decode()[:300]}"}
    names = r"id|created|system_fingerprint|[a-z_]*time[a-z_]*|[a-z_]*_tps|[a-z_]*_ms"
    text = re.sub(rf'"({names})": ?("[^"]*"|[\d.]+)', r'"\1": 0', text)
    return json.loads(text) if text.startswith("{") else text


def arrays(caches: list[Any]) -> list[Any]:
    """What stock-style code reads from caches: the K/V up to the offset."""
    return [[c.keys[..., : c.offset, :], c.values[..., : c.offset, :]] for c in caches]
