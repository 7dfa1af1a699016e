"""A live server on the demo model, clients for it, and what mlx-lm gives alone."""

import http.client
import json
import threading
import time
from contextlib import closing, contextmanager
from functools import lru_cache
from importlib import import_module

from mlx_lm import stream_generate
from openai import OpenAI

from mlx_paged.formats.foreign import Foreign
from mlx_paged.formats.registry import named
from mlx_paged.loading import load_model
from mlx_paged.server import flags as server_flags
from mlx_paged.server.__main__ import serving
from tests.support import TIMEOUT

MODEL = "default_model"
CODE = "def main():\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "color", "count"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
"""Of chats; each message is a line."""


@lru_cache
def demo():
    return load_model()


@lru_cache
def solo(prompt, max_tokens):
    """Text, tokens and log-probabilities that mlx-lm generates for this prompt alone."""
    model, tokenizer = demo()
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))
    tokens = [response.token for response in responses]
    logprobs = [response.logprobs[response.token].item() for response in responses]
    return "".join(response.text for response in responses), tokens, logprobs


def written(prompt, max_tokens):
    """The text that follows `prompt` in mlx-lm's text of its tokens and the generated ones."""
    tokenizer = demo()[1]
    tokens = tokenizer.encode(prompt) + solo(prompt, max_tokens)[1]
    whole = tokenizer.decode([token for token in tokens if token not in tokenizer.eos_token_ids])
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt)


@contextmanager
def running(*flags):
    """A server where the flags say; its thread is gone afterwards."""
    with serving(server_flags.parse(["--kv-memory", "0.05", *flags])) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield server
            wait_until(lambda: not any(m.taken for m in server.models.loaded.values()))
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def live(*flags):
    """A server on a free port; its thread and its blocks are gone afterwards."""
    with running("--port", "0", *flags) as server:
        yield server
        key = next(iter(server.app.state.args.all_keys.values()), None)
        wait_until(lambda: not metric(server, "mlx_paged_kv_blocks_in_use", key))


def only_model(server):
    (model,) = server.models.loaded.values()
    return model


@contextmanager
def model_format(server, form, problem=None):
    """The model of a server with another format, and a problem of its tools."""
    model = only_model(server)
    before, abilities = model.format, model.abilities
    model.format, model.abilities = form, abilities._replace(tools_problem=problem)
    try:
        yield
    finally:
        model.format, model.abilities = before, abilities


def tool_format(server, name, problem=None):
    """The model of a server with the tool format `name`: ours, or of mlx-lm's parsers."""
    marks, kind = only_model(server).format.marks, named(name)
    if kind is not None:
        return model_format(server, kind(marks, None), problem)
    return foreign_format(server, name, problem)


def foreign_format(server, name, problem=None):
    """The model of a server with the tool format `name`, read by mlx-lm's parser."""
    marks = only_model(server).format.marks
    module = import_module(f"mlx_lm.tool_parsers.{name}")
    given = module.parse_tool_call, module.tool_call_start, module.tool_call_end
    return model_format(server, Foreign(marks, None, name, *given), problem)


def client(server, key="none"):
    url = f"http://127.0.0.1:{server.address[1]}/v1"
    return OpenAI(base_url=url, api_key=key, timeout=TIMEOUT, max_retries=0)


def exchange(server, method, path, body=None, headers=()):
    """Status, headers and body of one answer, without any client's help."""
    connection = http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=TIMEOUT)
    given = {"Content-Type": "application/json"} | dict(headers)
    with closing(connection):
        connection.request(method, path, body, given)
        with connection.getresponse() as response:
            content = response.read()
    return response.status, response.headers, content


def post(server, body, path="/v1/completions", headers=()):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, found, content = exchange(server, "POST", path, raw, headers)
    return status, found, json.loads(content)


def metric(server, name, key=None):
    """The value of a metric, labels included in its name; None if there is none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    _, _, content = exchange(server, "GET", "/metrics", headers=headers)
    for line in content.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    return None


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
