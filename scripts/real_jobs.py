"""Requests for a chat model: short questions, and files of this repository to return edited."""

import keyword
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.serving.trace import Job
from scripts.batch_invariance import prompts_of

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "mlx_paged", "bench", "scripts"
CHARACTERS = range(800, 2000)  # of the files; longer answers than EDIT_TOKENS are cut
CHAT_TOKENS, EDIT_TOKENS = 160, 256  # of an answer at most

TASK = (
    "Here is the file {}:\n\n```python\n{}```\n\nRename `{old}` to `{new}` and change nothing else."
    " Answer with the whole file."
)


def chats(tokenizer: Any, count: int) -> list[Job]:
    return [Job(0.0, tuple(prompt), CHAT_TOKENS) for prompt in prompts_of(tokenizer, count)]


def edits(tokenizer: Any, count: int) -> list[Job]:
    return [Job(0.0, prompt, EDIT_TOKENS) for prompt, _ in tasks(tokenizer, count)]


def forced_edits(tokenizer: Any, count: int) -> list[Job]:
    """Edits without a mistake: see :class:`Forced`."""
    return [Job(0.0, prompt, len(answer)) for prompt, answer in tasks(tokenizer, count)]


JOBS = {"chat": chats, "edit": edits, "forced-edit": forced_edits}


def tasks(tokenizer: Any, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts, and answers without a mistake: the repository's small files in the order of their
    paths, each with its most frequent name to be renamed; then again with the next frequent ones.
    The prompt has the answer's first line, which opens a block of code."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    files = [(p.relative_to(ROOT), p.read_text()) for p in paths]
    files = [(path, text) for path, text in files if len(text) in CHARACTERS]
    found = []
    for index in range(count):
        nth, place = divmod(index, len(files))
        path, text = files[place]
        old = names(text)[nth]
        new = f"renamed_{old}"
        task = TASK.format(path, text, old=old, new=new)
        messages = [{"role": "user", "content": task}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompt = [*prompt, *tokenizer.encode("```python\n", add_special_tokens=False)]
        edited = re.sub(rf"\b{old}\b", new, text) + "```"
        answer = tokenizer.encode(edited, add_special_tokens=False)
        found.append((tuple(prompt), (*answer, tokenizer.eos_token_id)[:EDIT_TOKENS]))
    return found


class Forced:
    """A sampler that computes its choices, and then gives the tokens of a known answer instead. All
    of the model's work is done; only what it says is replaced.

    Args:
        answers: by prompt.
    """

    def __init__(self, sampler: Any, answers: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._sampler, self._answers = sampler, answers
        self._of_request: dict[int, tuple[int, ...]] = {}

    def __call__(self, logits: Any, requests: Any, newest: Any, lengths: Any, *others: Any) -> Any:
        sampled = self._sampler(logits, requests, newest, lengths, *others)
        tokens = []
        for request, length in zip(requests, lengths.tolist(), strict=True):
            if request.id not in self._of_request:
                prompt = tuple(request.tokens[: request.num_prompt])
                self._of_request[request.id] = self._answers[prompt]
            answer = self._of_request[request.id]
            tokens.append(answer[min(length - request.num_prompt, len(answer) - 1)])
        return replace(sampled, tokens=mx.array(tokens, mx.int32))


def names(text: str) -> list[str]:
    """Words of a source that may be renamed, the most frequent ones first."""
    counts = Counter(re.findall(r"\b[a-z_]{4,}\b", text))
    return [
        word for word, _ in counts.most_common() if not keyword.iskeyword(word) and word != "self"
    ]
