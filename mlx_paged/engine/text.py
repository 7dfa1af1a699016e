"""Text in, text out: prompts to token ids, sampled tokens to outputs. Knows no mlx."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from numbers import Integral
from operator import index
from typing import Any, Protocol

from mlx_paged.arguments import require, shown
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason, Request
from mlx_paged.scheduler.step import SampledToken


class Detokenizer(Protocol):
    """The part of mlx-lm's streaming detokenizers that is used here."""

    last_segment: str

    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...


class StopStrings:
    """Cuts a text before the first of some strings, which may span any number of pieces; `found` is
    that string then. Text that may be its start is held back until the next pieces decide."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def feed(self, segment: str) -> str:
        """Add a piece of text; return the text that became certain."""
        if self.stopped or not self._stop:
            return "" if self.stopped else segment
        pending = self._held + segment
        cut, self.found = self._first_stop(pending)
        end = len(pending) - self._possible_stop(pending) if cut is None else cut
        self._held = "" if self.stopped else pending[end:]
        return pending[:end]

    def rest(self) -> str:
        """The text that was held back; from here on it counts no more."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int | None, str | None]:
        """Where the stop string that ends first begins, and which it is. So the cuts of the text do
        not matter."""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1:] if found else (None, None)

    def _possible_stop(self, text: str) -> int:
        """Length of the longest suffix of `text` that is the start of a stop string."""
        lengths = (
            length
            for stop in self._stop
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)


class TextStream:
    """The text of one request, which ends before the first of the `stop` strings. The text of the
    tokens of `context` is not part of the result, but that of later tokens may depend on it."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)
        self._context = context
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain. A stop string sets `stopped`."""
        for before in self._context:
            self._detokenizer.add_token(before)
        if self._context:
            _ = self._detokenizer.last_segment  # reading it skips this text
        self._context = ()
        self._detokenizer.add_token(token)
        return self._keep(self._stop.feed(self._detokenizer.last_segment))

    def finish(self) -> str:
        """End the text; return the rest of it."""
        self._detokenizer.finalize()
        return self._keep(self._stop.feed(self._detokenizer.last_segment) + self._stop.rest())

    def _keep(self, certain: str) -> str:
        self.text += certain
        return certain


Prompt = str | Sequence[int]

_NO_SEQUENCES = (bytes, bytearray, memoryview, Set, Mapping)
"""Iterable types that hold no ordered token ids."""


class Tokenizer(Protocol):
    """The part of mlx-lm's TokenizerWrapper that is used here."""

    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def detokenizer(self) -> Detokenizer: ...
    def encode(self, text: str, **options: Any) -> Sequence[int]: ...


class PromptEncoder:
    """Encodes and checks the prompts that callers give; without a tokenizer they are token ids,
    which are below `vocab_size` if that is known."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def __call__(self, prompt: Prompt, continues: bool = False) -> list[int]:
        """Token ids of a prompt. If it `continues` another prompt, it may be empty. Raises
        ValueError for an empty prompt, neither text nor token ids, a token outside the vocabulary,
        text without a tokenizer."""
        if isinstance(prompt, list) and hasattr(prompt, "sight"):
            if continues:
                raise ValueError("[fork] suffix has images: expected text or token ids")
            return prompt
        if not isinstance(prompt, str):
            tokens = _token_ids(prompt)
        elif continues and not prompt:
            tokens = []
        elif self.tokenizer is None:
            raise ValueError("[add_request] prompt is text: expected token ids or a tokenizer")
        else:
            bos = self.tokenizer.bos_token
            special = not continues and (bos is None or not prompt.startswith(bos))
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=special))
        if not tokens:
            if continues:
                return tokens
            raise ValueError("[add_request] prompt is empty: expected at least one token")
        limit = self.vocab_size or max(tokens) + 1
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limit:
                raise ValueError(
                    f"[add_request] prompt has token {token}: expected ids in [0, {limit})"
                )
        return tokens


def prompt_list(caller: str, prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """The prompts of a call, as a list: several, or one text or its token ids; else ValueError."""
    if isinstance(prompts, str) or hasattr(prompts, "sight"):
        return [prompts]  # type: ignore[list-item]
    each = _items(caller, "prompts", prompts, "text, token ids, or a sequence of these")
    is_token = [isinstance(x, Integral) or getattr(x, "ndim", None) == 0 for x in each[:1]]
    return [each] if any(is_token) else each


def _token_ids(prompt: object) -> list[int]:
    """The integers of a sequence, a NumPy array or an mx.array."""
    tokens = _items("add_request", "prompt", prompt, "text or a sequence of token ids")
    are_plain = set(map(type, tokens)) <= {int}
    return tokens if are_plain else [_token_id(token) for token in tokens]


def _items(caller: str, name: str, value: Any, expected: str) -> list[Any]:
    """What a sequence, a NumPy array or an mx.array holds. Raises ValueError for anything else."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        value = value.tolist()
    is_ordered = isinstance(value, Iterable) and not isinstance(value, _NO_SEQUENCES)
    require(is_ordered, caller, name, value, expected)
    return list(value)


def _token_id(token: Any) -> int:
    try:
        number = token.item() if hasattr(token, "item") else token  # of an array
        if not isinstance(number, bool):
            return index(number)
    except (TypeError, ValueError):
        pass
    expected = "expected integers, or one text"
    raise ValueError(f"[add_request] prompt has token {shown(token)}: {expected}")


class OutputProcessor:
    """Appends sampled tokens to their requests, decides which requests end, and makes text. Without
    a tokenizer outputs have no text, and only a request's own stop tokens end it."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self.tokenizer = tokenizer
        self._clock = clock
        self._texts: dict[int, TextStream] = {}
        self._stop_ids: dict[int, Collection[int]] = {}  # by request id

    def add(self, request: Request, context: Sequence[int] = ()) -> None:
        """Expect tokens of `request`; its text continues the text of `context`."""
        self._stop_ids[request.id] = self.stop_token_ids(request)
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer
            keeps_space = request.params.keep_space or request.params.constraint is not None
            if keeps_space and not context:
                # A detokenizer drops a space at the beginning, which a grammar may demand.
                context = self.tokenizer.encode("x", add_special_tokens=False)
            self._texts[request.id] = TextStream(detokenizer, request.params.stop, context)

    def append(self, choice: SampledToken) -> tuple[TokenOutput, FinishReason | None]:
        """Append a token to its request; say why the request ends, if it does."""
        request, token = choice.request, choice.token
        request.tokens.append(token)
        request.logprobs.append(choice.logprob)
        text = self._texts.get(request.id)
        ends = token in self._stop_ids[request.id]
        segment = "" if text is None or ends else text.push(token)
        reason = None
        if ends or (text is not None and text.stopped):
            reason = FinishReason.STOP
        elif len(request.tokens) - request.num_prompt == request.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and text is not None:
            segment += text.finish()
        top = choice.top[: request.params.logprobs] if choice.top else ()
        if request.grammar is not None:
            top = tuple(pair for pair in top if pair[1] > -math.inf)  # which it allows
        if top:
            request.top_logprobs.append(top)
        told = request.id, token, segment, choice.logprob, top
        return TokenOutput(*told, cached_prompt_tokens=request.num_cached), reason

    def stop_token_ids(self, request: Request) -> Collection[int]:
        own = request.params.stop_token_ids
        if self.tokenizer is None or request.params.ignore_eos:
            return own
        return own.union(self.tokenizer.eos_token_ids) if own else self.tokenizer.eos_token_ids

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens, end-of-sequence token excluded; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text = TextStream(self.tokenizer.detokenizer)
        for token in tokens:
            if token not in self.tokenizer.eos_token_ids:
                text.push(token)
        text.finish()
        return text.text

    def finish(self, request: Request, reason: FinishReason) -> Completion:
        """The completion of a request that ends now."""
        text = self.forget(request)
        request.finish_reason = reason
        request.finish_time = self._clock()
        return Completion.of(request, "" if text is None else text.text)

    def forget(self, request: Request) -> TextStream | None:
        """Expect no more tokens of a request; return its text so far."""
        self._stop_ids.pop(request.id, None)
        return self._texts.pop(request.id, None)
