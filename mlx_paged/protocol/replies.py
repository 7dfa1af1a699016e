"""What an answer says as a whole, in the forms of OpenAI's APIs. Knows no HTTP."""

import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

from mlx_lm.server import get_system_fingerprint

from mlx_paged.protocol import prompts, responses
from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.protocol.deltas import Delta
from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.model_traits import ModelTraits
from mlx_paged.protocol.prompts import Prompt
from mlx_paged.protocol.request_body import refusing
from mlx_paged.sampling_params import CONSTRAINTS, SamplingParams

Compile = Callable[[SamplingParams], object]


@dataclass(kw_only=True)
class Reply:
    """An answer of chat completions or of completions."""

    fields: Fields
    prompts: list[Prompt] = field(default_factory=list)
    choices: list[CompletionChoice] = field(default_factory=list)
    max_tokens: int | None = None  # that the context has room for, if others are asked for
    names: ClassVar[Mapping[str, str]] = {}  # what fields of chat completions are called

    @cached_property
    def head(self) -> dict[str, Any]:
        """The part of the answer that all its packets have."""
        is_chat, end = "messages" in self.fields, ".chunk" if self.fields["stream"] else ""
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": get_system_fingerprint(),
            "object": f"chat.completion{end}" if is_chat else "text_completion",
            "model": self.fields["model"],
            "created": int(time.time()),
        }

    def read(
        self, model: ModelTraits, args: Namespace, template_args: dict[str, Any]
    ) -> list[SamplingParams]:
        """Encode the prompts; how the tokens after each are chosen. `args` has the defaults,
        `template_args` those of the chat template. Raises as :func:`prompts.encode`."""
        self.prompts = prompts.encode(model, self.fields, template_args)
        return self.sampling(model, args)

    def sampling(self, model: ModelTraits, args: Namespace) -> list[SamplingParams]:
        """How the tokens after each of the prompts are chosen; `args` has the defaults. Raises as
        :func:`prompts.sampling`."""
        found = [prompts.sampling(model, prompt, self.fields, args) for prompt in self.prompts]
        most = min((params.max_tokens for params in found), default=None)
        self.max_tokens = None if self.fields["max_tokens"] in (None, 0, most) else most
        return found

    def compile(self, compiles: Compile, params: SamplingParams) -> None:
        """Compile a grammar. If that of "a call or an answer" is wrong, find which of both is."""
        try:
            compiles(params)
        except ValueError:
            if prompts.may_answer_or_call(self.fields):
                compiles(SamplingParams(**self.fields["constraint"]))
                with refusing(dict.fromkeys(CONSTRAINTS, "tools")):
                    raise
            raise

    def refusing(self) -> AbstractContextManager[None]:
        """Refuses a request with the errors of the engine, in the names of its API."""
        source = self.names.get(self.fields["constrained_by"], self.fields["constrained_by"])
        return refusing({**self.names, **dict.fromkeys(CONSTRAINTS, source)})

    def whole(self, parts: dict[int, Delta]) -> dict[str, Any]:
        """The answer of all choices, whose parts `parts` has, by their indexes."""
        kept = [choice.entry(parts[choice.index]) for choice in self._best()]
        choices = [entry | {"index": index} for index, entry in enumerate(kept)]
        return self.head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """The tokens that it took."""
        prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        generated = sum(choice.num_tokens for choice in self.choices)
        thoughts = sum(choice.num_thoughts for choice in self.choices)
        cached = sum(choice.num_cached for choice in self.choices[:: self.fields["best_of"]])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thoughts},
            **self.of_cache(),
        }

    def of_cache(self) -> dict[str, Any]:
        """The part of the usage that says what came of a wish to keep K/V."""
        firsts = self.choices[:: self.fields["best_of"]]
        ended = [choice.completion for choice in firsts if choice.completion is not None]
        found = [each.pinned for each in ended if each.pinned is not None]
        if not found:
            return {}
        reason = next((each.reason for each in found if each.reason), None)
        return {"cache": {"pinned_tokens": sum(each.tokens for each in found), "reason": reason}}

    def _best(self) -> list[CompletionChoice]:
        """The `n` likeliest of the choices of each prompt."""
        n, count, found = self.fields["n"], self.fields["best_of"], list[CompletionChoice]()
        for first in range(0, len(self.choices), count):
            group = self.choices[first : first + count]
            by_mean = sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)
            found += group if n == count else by_mean[:n]
        return found


class ResponseReply(Reply):
    """An answer of OpenAI's Responses API; the fields have the request itself as `body`."""

    names = responses.NAMES

    @cached_property
    def items(self) -> responses.Items:
        return responses.Items(self.fields["body"])

    def whole(self, parts: dict[int, Delta]) -> dict[str, Any]:
        for _ in chain(self.items.add(parts[0]), self.end()):
            pass
        return self.items.response

    def end(self) -> Iterator[bytes]:
        """The last events."""
        (choice,) = self.choices
        return self.items.end(choice.finish_reason != "length", self.usage())

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        details = usage["prompt_tokens_details"] | {"cache_write_tokens": 0}
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            **self.of_cache(),
        }
