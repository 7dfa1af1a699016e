"""Reads the prompts of the command line and of a JSONL file. Does not import mlx."""

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_paged.arguments import one_line
from mlx_paged.generate.batch_lines import BatchLine, is_batch_line, read_line
from mlx_paged.protocol.fields import AS_MANY_AS_FIT
from mlx_paged.request import BACKGROUND
from mlx_paged.sampling_params import CONSTRAINTS, SamplingParams
from mlx_paged.vision.images import is_image, parts_of

STDIN = "-"
"""In place of a prompt or of a file's name: standard input."""
ALIASES = {"temp": "temperature"}

FIELDS = {each.name: each.type for each in fields(SamplingParams)}
NUMBERS = [name for name, kind in FIELDS.items() if kind in (int, float, int | None, float | None)]
OPTIONS = [name for name in FIELDS if name not in ("logits_processors", "sampler")]  # no callables
EXPECTED = 'expected an object such as {"prompt": "..."}'
KEYS = (*OPTIONS, *ALIASES, "n", "priority", "images")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """The request of one line or of one --prompt."""

    prompt: str | None  # the text; None if `messages` or a batch line are given
    messages: list[dict[str, Any]] | None = None  # a chat for the model's chat template
    # Fields of SamplingParams that replace those of the command line.
    options: dict[str, Any] = field(default_factory=dict)
    source: str = "--prompt"  # file and line, or the flag; error messages start with it
    id: Any = None  # the "id" of the line; the result repeats it
    n: int | None = None  # number of completions; None means the value of the command line
    # The policy "priority" starts lower numbers first; "background": when nothing else waits.
    priority: int | str = 0
    images: tuple[str, ...] = ()  # files: of the chat's places; without, its last message begins so
    batch: BatchLine | None = None  # a line of OpenAI's batch files

    @property
    def title(self) -> str:
        """The prompt, or the last message, on one line."""
        text = self.prompt if self.messages is None else str(self.messages[-1].get("content", ""))
        return " ".join((text or "").split())


def prompt_specs(args: argparse.Namespace) -> list[PromptSpec]:
    """The prompts of the command line, then those of the prompts file. Raises ValueError if there
    is none, a line is wrong, or the file cannot be read."""
    images = tuple(args.image)
    if images and not (args.prompt and args.vision):
        raise ValueError("--image is given: expected --prompt and --vision beside it")
    if [*args.prompt, args.prompts_file].count(STDIN) > 1:
        raise ValueError("two prompts are '-': expected standard input for one of them")
    specs = [PromptSpec(_prompt_text(prompt), images=images) for prompt in args.prompt]
    if args.prompts_file is not None:
        try:
            with _opened(args.prompts_file) as lines:
                specs += read_prompts(lines, args.prompts_file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompts_file}: not UTF-8: {error.reason}") from error
        except OSError as error:
            reason = f"{error.strerror}: expected a file of JSON lines, or - for standard input"
            raise ValueError(f"--prompts-file {args.prompts_file}: {reason}") from error
    if not specs:
        raise ValueError("no prompt: give --prompt or --prompts-file")
    return specs


def read_prompts(lines: Iterable[str], name: str) -> list[PromptSpec]:
    """Parse JSONL; blank lines are skipped. In a file of OpenAI's batch lines a wrong line is one
    that will be refused; in other files it raises ValueError, which names file, line, mistake."""
    entries = {
        f"{name} line {number}": _loaded(line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    }
    if not entries:
        raise ValueError(f"{name}: no prompts in it")
    if any(map(is_batch_line, entries.values())):
        taken = set[str]()
        return [
            PromptSpec(None, source=source, batch=read_line(entry, taken))
            for source, entry in entries.items()
        ]
    specs = []
    for source, entry in entries.items():
        try:
            if isinstance(entry, ValueError):
                raise ValueError(f"{entry}: {EXPECTED}")
            specs.append(_parse(entry, source))
        except ValueError as error:
            raise ValueError(f"{source}: {one_line(error)}") from None
    return specs


def _opened(name: str) -> AbstractContextManager[Iterable[str]]:
    """The lines of a file, or those of standard input, which stays open."""
    if name != STDIN:
        return Path(name).open(encoding="utf-8")
    return nullcontext(line.decode() for line in sys.stdin.buffer)


def _loaded(line: str) -> Any:
    """The value of a line of JSON, or the ValueError that tells why there is none."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return ValueError(f"not valid JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        return ValueError("not valid JSON: nested too deep")
    except ValueError as error:  # an integer of too many digits
        return error


def _parse(entry: Any, source: str) -> PromptSpec:
    if not isinstance(entry, dict):
        raise ValueError(EXPECTED)
    entry = dict(entry)
    prompt, messages = entry.pop("prompt", None), entry.pop("messages", None)
    request_id = entry.pop("id", None)
    if (prompt is None) == (messages is None):
        raise ValueError('expected exactly one of "prompt" and "messages"')
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError('"prompt" must be a string')
    if messages is not None and not _is_chat(messages):
        raise ValueError('"messages" must be a list of {"role": ..., "content": ...}')
    unknown = sorted(entry.keys() - set(KEYS))
    if unknown:
        raise ValueError(f'unknown key "{unknown[0]}": expected one of {", ".join(KEYS)}')
    is_background = entry.get("priority") == BACKGROUND
    priority = entry.pop("priority") if is_background else _whole(entry, "priority")
    n = _whole(entry, "n")
    images = entry.pop("images", [])
    if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
        raise ValueError('"images" must be a list of files')
    _check_places(messages or [], len(images))
    options = {ALIASES.get(key, key): value for key, value in entry.items()}
    if "logit_bias" in options:
        options["logit_bias"] = _biases(options["logit_bias"])
    checked = {k: v for k, v in options.items() if (k, v) != ("max_tokens", AS_MANY_AS_FIT)}
    SamplingParams(**checked)  # raises ValueError for wrong values
    if options.keys() & set(CONSTRAINTS):  # one of them replaces any of the command line
        options = dict.fromkeys(CONSTRAINTS) | options
    return PromptSpec(prompt, messages, options, source, request_id, n, priority or 0, (*images,))


def _whole(entry: dict[str, Any], key: str) -> int | None:
    """Remove a whole number from the entry and return it."""
    value = entry.pop(key, None)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        other = f' or "{BACKGROUND}"' if key == "priority" else ""
        raise ValueError(f'"{key}" must be a whole number{other}')
    if key == "n" and value is not None and value < 1:
        raise ValueError('"n" must be at least 1')
    return value


def _is_chat(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)


def _check_places(messages: list[dict[str, Any]], num_images: int) -> None:
    """Raise ValueError unless each image of a chat has its place in a message of the user."""
    parts = [(m["role"], p) for m in messages for p in parts_of(m.get("content")) if is_image(p)]
    if any(part != {"type": "image"} for _, part in parts):
        raise ValueError('a message has an image: expected {"type": "image"}, and "images"')
    if parts and len(parts) != num_images:
        raise ValueError(f'"messages" has {len(parts)} places: expected one for each of "images"')
    roles = {role for role, _ in parts} or {m["role"] for m in messages[-1:] if num_images}
    if roles - {"user"}:
        raise ValueError('an image is in no message of the role "user", expected in one of these')


def _biases(value: Any) -> dict[int, float]:
    """JSON has no integer keys, so {"42": -1.5} means token 42."""
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError('"logit_bias" must be an object such as {"42": -1.5}') from None


def _prompt_text(prompt: str) -> str:
    """As in mlx_lm.generate: '-' reads stdin, and a typed \\n or \\t becomes the character."""
    if prompt == STDIN:
        return sys.stdin.read()
    return prompt.replace("\\n", "\n").replace("\\t", "\t")
