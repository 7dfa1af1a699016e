"""A server whose model has the marks of a format of tool calls and says what a script has.

The part of ``scripts.agents`` that speaks: in each turn the model writes files with the tools that
the client offers. The model is the demo model with the marks' tokens, which computes every token;
only what the model says is replaced.
"""

import dataclasses
import json
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from mlx_paged import demo_model_path
from mlx_paged.protocol import prompts
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server import flags
from mlx_paged.server.__main__ import serving
from tests.support.commands.scripted_models import CALLS, CHANNELS

MODEL = "agent"
ENDED = "All files are written, </tool_call> and <think> too."
"""What the model says after the last turn."""

FILES = (
    "\tdef f():\n\t\treturn 1\n",
    "    a\n\n  b  \n",
    "A thought begins with <think> and ends with </think>.\n",
    "a </tool_call> b <tool_call> c\n",
    "</parameter>\n</function>\n\t<parameter=x>\n",
    '{"x": "\\n", "y": [1, 2], "z": \'q\'}\n',
    "é🙂 \u2028 ü\n",
    "no newline at the end",
    "null",
    "<|im_end|>\n<|im_start|>user\n  <tool_call>{}</tool_call> &lt;\n",
    "<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>\n",
)
Parts = list[tuple[str, bool]]
"""Texts, and whether the marks in a text are tokens of their own."""

Call = tuple[str, dict[str, Any]]

_CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_NAMES = ("start", "end", "message", "channel", "constrain", "return", "call")
_TURNS = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\nCONTENTCALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTENT = "{{ m.content }}"
_SHORT = "{{ m.content if m.role in ('assistant', 'tool') else m.content[-2000:] }}"
"""Instructions of agents have tens of thousands of tokens, which the demo model does not follow."""


def _json_calls(calls: list[Call]) -> Parts:
    parts: Parts = []
    for name, arguments in calls:
        text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        parts += [("<tool_call>", True), (f"\n{text}\n", False), ("</tool_call>", True)]
    return parts


def _xml_calls(calls: list[Call]) -> Parts:
    parts: Parts = []
    for name, arguments in calls:
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        text = f"\n<function={name}>\n{values}</function>\n"
        parts += [("<tool_call>", True), (text, False), ("</tool_call>", True)]
    return parts


def _harmony_calls(calls: list[Call]) -> Parts:
    parts: Parts = [("<|channel|>analysis<|message|>I write.", True)]
    for name, arguments in calls:
        header = f"commentary to=functions.{name} <|constrain|>json<|message|>"
        parts += [(f"<|end|><|start|>assistant<|channel|>{header}", True)]
        parts += [(json.dumps(arguments, ensure_ascii=False), False)]
    return [*parts, ("<|call|>", True)]


@dataclasses.dataclass(frozen=True)
class Format:
    """How the models of a family write."""

    marks: tuple[str, ...]
    template: str
    calls: Any
    """Function that returns the parts of a turn that makes these calls."""
    answer: str = ""
    """What comes before an answer."""


FORMATS = {
    "JSON in tags": Format(
        _CHATML,
        _TURNS.replace("CONTENT", _SHORT).replace("CALLS", CALLS["json_tools"]),
        _json_calls,
    ),
    "qwen3_coder XML": Format(
        _CHATML,
        _TURNS.replace("CONTENT", _SHORT).replace("CALLS", CALLS["qwen3_coder"]),
        _xml_calls,
    ),
    "Harmony": Format(
        tuple(f"<|{name}|>" for name in _NAMES),
        CHANNELS.replace(f"<|message|>{_CONTENT}", f"<|message|>{_SHORT}").replace(
            "'// ' + t.function.description + t.function.name", "t.function.name"
        ),
        _harmony_calls,
        "<|channel|>final<|message|>",
    ),
}

SHELLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
}
"""Tools of the agents that run a shell command, and their argument for it."""

WRITERS = {
    "Write": ("file_path", "content"),
    "write": ("filePath", "content"),
    "write_file": ("file_path", "content"),
}
"""Tools that write a file, and their arguments for its path and its text."""


@dataclasses.dataclass
class Task:
    """What a client is to do, and how far the client came.

    Args:
        folder: where the files are written.
        num_turns: turns of the model that make calls.
    """

    folder: Path
    num_turns: int
    num_calls: int = 2
    """Calls of a turn: 1 for a client that takes no parallel calls."""
    num_results: int = 0
    """Results that the client has sent back."""

    def wanted(self) -> dict[str, str]:
        """The texts of the files, by name."""
        count = self.num_turns * self.num_calls
        return {f"file {i}.txt": FILES[i % len(FILES)] for i in range(count)}

    def parts(self, fields: dict[str, Any], written: Format) -> Parts:
        """The script: what the model says to a request."""
        results = sum(message["role"] == "tool" for message in fields["messages"])
        offered = {tool["function"]["name"]: tool["function"] for tool in fields.get("tools") or ()}
        if not any(name in offered for name in (*SHELLS, *WRITERS)):
            return [(f"{written.answer}A title", True)]
        self.num_results = max(self.num_results, results)
        if fields["body"].get("parallel_tool_calls") is False:
            self.num_calls = 1
        if results >= self.num_turns * self.num_calls:
            return [(written.answer, True), (ENDED, False)]
        files = [*self.wanted().items()][results : results + self.num_calls]
        calls = [
            self._call(offered, name, text, (results + i) % 2 == 0)
            for i, (name, text) in enumerate(files)
        ]
        parts: Parts = written.calls(calls)
        return parts

    def _call(self, offered: dict[str, Any], name: str, text: str, is_shell_wanted: bool) -> Call:
        shell = next((tool for tool in SHELLS if tool in offered), None)
        writer = next((tool for tool in WRITERS if tool in offered), None)
        path = str(self.folder / name)
        if writer is None or (shell is not None and is_shell_wanted):
            assert shell is not None
            quoted = shlex.quote(path)
            command = f"printf %s {shlex.quote(text)} > {quoted} && cat {quoted}"
            tool, arguments = shell, {SHELLS[shell]: command}
        else:
            tool, (key, content) = writer, WRITERS[writer]
            arguments = {key: path, content: text}
        required = offered[tool]["parameters"].get("required", ())
        given: dict[str, Any] = {
            key: False if key == "is_background" else "a step of the task" for key in required
        }
        return tool, given | arguments


def _make_model(path: Path, marks: tuple[str, ...]) -> Tokenizer:
    """The tokenizer of a model in the folder `path`: the demo model with tokens for `marks`."""
    shutil.copytree(demo_model_path(), path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer.save(str(path / "tokenizer.json"))
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    table = weights["model.embed_tokens.weight"]
    size = tokenizer.get_vocab_size()
    weights["model.embed_tokens.weight"] = mx.pad(table, [(0, size - len(table)), (0, 0)])
    mx.eval(weights)
    (path / "model.safetensors").unlink()
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return tokenizer


def _encode(tokenizer: Tokenizer, parts: Parts) -> list[int]:
    tokens: list[int] = []
    for text, is_marked in parts:
        tokenizer.encode_special_tokens = not is_marked
        tokens += tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


@contextmanager
def scripted(written: Format, tasks: list[Task]) -> Iterator[str]:
    """The URL of a server whose model follows the script of the last of `tasks`."""
    with tempfile.TemporaryDirectory() as path:
        tokenizer = _make_model(Path(path), written.marks)

        def script(model: Any, fields: dict[str, Any]) -> list[int]:
            return _encode(tokenizer, tasks[-1].parts(fields, written))

        with following(script, "--model", path, "--chat-template", written.template) as url:
            yield url


@contextmanager
def following(script: Callable[[Any, dict[str, Any]], list[int]], *options: str) -> Iterator[str]:
    """The URL of a server whose model computes each token and chooses those of a script.

    Args:
        script: the tokens of an answer, without its end, of a loaded model and of the fields of a
            chat.
        options: further flags of the server.
    """
    sampling = prompts.sampling

    def forced(model: Any, prompt: Any, fields: dict[str, Any], args: Any) -> SamplingParams:
        params, first = sampling(model, prompt, fields, args), len(prompt.tokens)
        tokens_of_answer = [*script(model, fields), min(model.tokenizer.eos_token_ids)]

        def choose(tokens: mx.array, logits: mx.array) -> mx.array:
            token = tokens_of_answer[min(tokens.size - first, len(tokens_of_answer) - 1)]
            chosen = mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)
            return chosen[None].astype(logits.dtype)

        return dataclasses.replace(params, logits_processors=(choose,))

    shared = ["--max-context", "131072", "--kv-memory", "0.6", "--max-models", "0"]
    shared += ["--port", "0", "--served-model-name", MODEL]
    prompts.sampling = forced
    try:
        with serving(flags.parse([*options, *shared])) as server:
            thread = threading.Thread(target=server.run)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.address[1]}"
            finally:
                server.should_exit = True
                thread.join()
    finally:
        prompts.sampling = sampling
