"""Scripts and servers of mlx-lm give the same text with one import line more."""

import json
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from queue import SimpleQueue

import mlx_lm.server
import pytest

from mlx_paged import unpatch_mlx_lm
from mlx_paged.attention.forward import path_counts
from mlx_paged.cli import demo_model_path
from tests.support.commands.server_harness import TIMEOUT, solo

LINE = "import mlx_paged.auto_patch\n"

WITH_FUNCTIONS = """
import sys
from mlx_lm import batch_generate, generate, load
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

model, tokenizer = load(sys.argv[1])
print(generate(model, tokenizer, prompt="def main():", max_tokens=24))

cache = make_prompt_cache(model)
for prompt in ("class Stack:", "    def push(self"):
    print(generate(model, tokenizer, prompt=prompt, max_tokens=12, prompt_cache=cache))
trim_prompt_cache(cache, 12)
print(generate(model, tokenizer, prompt="    def pop(self", max_tokens=12, prompt_cache=cache))

prompts = [tokenizer.encode(prompt) for prompt in ("import os", "def add(a, b):", "x")]
print(batch_generate(model, tokenizer, prompts, max_tokens=12).texts)
"""

WITH_THE_COMMAND = """
import sys
from mlx_lm.generate import main

sys.argv[1:] = ["--model", sys.argv[1], "--prompt", "def main():", "--max-tokens", "24"]
sys.argv += ["--verbose", "F"]
main()
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx_paged.auto_patch", raising=False)
    monkeypatch.setattr(sys, "argv", ["script.py", str(demo_model_path())])
    yield
    unpatch_mlx_lm()


@pytest.mark.slow
@pytest.mark.parametrize("script", [WITH_FUNCTIONS, WITH_THE_COMMAND], ids=["functions", "command"])
def test_a_script_prints_the_same(script, capsys, monkeypatch):
    printed = []
    for text in (script, LINE + script):
        monkeypatch.setattr(sys, "argv", ["script.py", str(demo_model_path())])
        path_counts.clear()
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    assert len(printed[0]) > 20 and printed[0] == printed[1]
    assert path_counts["paged"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")
def test_mlx_lms_own_server_answers_the_same(monkeypatch):
    """With its own flags, several requests side by side, and one that finds a prefix."""
    serve_forever, servers = ThreadingHTTPServer.serve_forever, SimpleQueue()

    def serve(server) -> None:
        servers.put(server)
        serve_forever(server, 0.01)
        raise KeyboardInterrupt  # upon which mlx-lm ends its generating thread

    def ask(prompt: str) -> str:
        body = json.dumps({"prompt": prompt, "max_tokens": 12}).encode()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1/completions"
        with urllib.request.urlopen(url, body, TIMEOUT) as answer:
            return json.load(answer)["choices"][0]["text"]

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve)
    flags = ["--port", "0", "--model", sys.argv[1], "--decode-concurrency", "3"]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", *flags])
    prompts = ["def main():", "import os", "class A", "def main():\n    x", "def add(a, b):"]
    exec(LINE)
    path_counts.clear()
    thread = threading.Thread(target=mlx_lm.server.main)
    thread.start()
    server = servers.get(timeout=TIMEOUT)
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = list(pool.map(ask, prompts))
        prompts.append(prompts[0] + texts[0] + "\n")
        texts.append(ask(prompts[-1]))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert path_counts["paged"] > 0
    assert texts == [solo(prompt, 12)[0] for prompt in prompts]
