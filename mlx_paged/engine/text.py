"""Text in, text out: prompts to token ids, sampled tokens to outputs. Knows no mlx."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from numbers import Integral
from operator import index
from typing import Any, Protocol

from mlx_paged.arguments import require, require_text, shown
from mlx_paged.engine.detokenizer import UNKNOWN, Detokenizer
from mlx_paged.engine.spelling import detokenizer_of, spelling_of
from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.prompt import Prompt
from mlx_paged.request import FinishReason, Request
from mlx_paged.scheduler.progress import TopLogprobs
from mlx_paged.scheduler.step import SampledToken


class _Matcher:
    """How much of a stop string the text so far ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters; all of them at the end of an occurrence
        # By a number of matched characters: the next smaller number that they end with as well.
        self._shorter = [0, 0]
        for character in stop[1:]:
            self._shorter.append(self._longer(character, self._shorter[-1]))

    def _longer(self, character: str, matched: int) -> int:
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.stop[matched] == character)

    def find(self, piece: str) -> int | None:
        """Add a piece of the text; return where in it the stop string ends, if it does."""
        if not self.matched and self.stop[0] not in piece:
            return None
        for i, character in enumerate(piece):
            self.matched = self._longer(character, self.matched)
            if self.matched == len(self.stop):
                return i + 1
        return None


class StopStrings:
    """Cuts a text before the first of some strings, which may span any number of pieces; `found` is
    that string then. Text that may be its start is held back until the next pieces decide. The
    time is linear in the length of the text."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._matchers = [_Matcher(each) for each in stop]
        self._held = ""
        self.longest = max(map(len, stop), default=0)
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def feed(self, segment: str) -> str:
        """Add a piece of text; return the text that became certain."""
        if self.stopped or not self._matchers:
            return "" if self.stopped else segment
        pending = self._held + segment
        ends = [
            (end, -len(matcher.stop), matcher.stop)
            for matcher in self._matchers
            if (end := matcher.find(segment)) is not None
        ]
        if ends:  # the one that ends first and, of these, begins first: cuts do not matter
            end, _, self.found = min(ends)
            size = len(self._held) + end - len(self.found)
        else:
            size = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = "" if self.stopped else pending[size:]
        return pending[:size]

    def is_in(self, following: str) -> bool:
        """Whether the text would contain a stop string if it went on with `following`. A
        `following` of twice the length of the longest stop string may lack its own beginning."""
        is_whole = len(following) < 2 * self.longest
        text = self._held + following if is_whole else following
        return any(matcher.stop in text for matcher in self._matchers)

    def rest(self) -> str:
        """The text that was held back; from here on it counts no more."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held


class TextStream:
    """The text of one request, which ends before the first of the `stop` strings. The text of the
    tokens of `context` is not part of the result, but that of later tokens may depend on it.

    Args:
        detokenizer: a text of :class:`mlx_paged.engine.detokenizer.Spelling`, or a streaming
            detokenizer in mlx-lm's form.
    """

    def __init__(
        self, detokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._detokenizer: Detokenizer = detokenizer_of(detokenizer, context)
        self._stop = StopStrings(stop)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain. A stop string sets `stopped`, also if
        only the end of the text makes that string certain."""
        certain = self._stop.feed(self._detokenizer.push(token))
        longest = self._stop.longest
        if longest and not self.stopped:
            pending = self._detokenizer.pending(2 * longest).rstrip(UNKNOWN)
            if pending and self._stop.is_in(pending):
                certain += self._stop.feed(self._detokenizer.finish())
        return self._keep(certain)

    def finish(self) -> str:
        """End the text; return the rest of it."""
        return self._keep(self._stop.feed(self._detokenizer.finish()) + self._stop.rest())

    def _keep(self, certain: str) -> str:
        if certain:
            self._parts.append(certain)
        return certain


PromptLike = str | Sequence[int]

_NO_SEQUENCES = (bytes, bytearray, memoryview, Set, Mapping)
"""Iterable types that hold no ordered token ids."""


class Tokenizer(Protocol):
    """The part of mlx-lm's TokenizerWrapper that is used here."""

    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def detokenizer(self) -> Any: ...
    def encode(self, text: str, **options: Any) -> Sequence[int]: ...


class PromptEncoder:
    """Encodes and checks the prompts that callers give; without a tokenizer they are token ids,
    which `ids` checks.

    Attributes:
        positions: tokens that the model has positions for; None: no limit is known.
    """

    def __init__(self, tokenizer: Tokenizer | None, ids: TokenIds) -> None:
        self.tokenizer = tokenizer
        self.ids = ids
        self.positions: int | None = None
        self._is_chat_model = bool(getattr(tokenizer, "has_chat_template", False))

    def __call__(self, prompt: PromptLike, continues: bool = False) -> Prompt:
        """An encoded prompt. If it `continues` another prompt, it may be empty. Raises
        ValueError for an empty prompt, neither text nor token ids, a token that the embedding does
        not have, text without a tokenizer, text that UTF-8 cannot encode."""
        if isinstance(prompt, Prompt):
            if continues and not prompt.is_plain:
                raise ValueError("[fork] suffix has images: expected text or token ids")
            if not prompt.tokens:
                return self._empty(continues)
            self.ids.check_prompt("add_request", prompt.tokens)
            self._advise_length(prompt.tokens)
            return prompt
        if not isinstance(prompt, str):
            tokens = _token_ids(prompt)
        elif continues and not prompt:
            tokens = []
        elif self.tokenizer is None:
            raise ValueError("[add_request] prompt is text: expected token ids or a tokenizer")
        else:
            require_text("add_request", "prompt", prompt)
            bos = self.tokenizer.bos_token
            special = not continues and (bos is None or not prompt.startswith(bos))
            if self._is_chat_model and not continues:
                self._advise_chat(prompt)
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=special))
        if not tokens:
            return self._empty(continues)
        self.ids.check_prompt("add_request", tokens)
        self._advise_length(tokens)
        return Prompt(tokens)

    def _empty(self, continues: bool) -> Prompt:
        """An empty prompt, which is allowed only if it continues another one."""
        if not continues:
            raise ValueError("[add_request] prompt is empty: expected at least one token")
        return Prompt([])

    def _advise_length(self, tokens: Sequence[int]) -> None:
        """Log once that a prompt leaves no position for a completion. It is computed, as by
        mlx-lm."""
        if self.positions is not None and len(tokens) >= self.positions:
            logging.getLogger("mlx_paged").warning(
                "a prompt has %d tokens, but the model has %d positions: expect wrong text",
                len(tokens),
                self.positions,
            )
            self.positions = None

    def _advise_chat(self, prompt: str) -> None:
        """Log once that a chat model got a text, unless the text has marks of a chat."""
        marks = getattr(self.tokenizer, "all_special_tokens", ())
        if not any(mark in prompt for mark in marks):
            self._is_chat_model = False
            logging.getLogger("mlx_paged").warning(
                "a text is the prompt of a chat model: engine.chat() applies the chat template"
            )


def prompt_list(caller: str, prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """The prompts of a call, as a list: several, or one text or its token ids; else ValueError."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
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
        self._spelling = None if tokenizer is None else spelling_of(tokenizer)
        self._clock = clock
        self._texts: dict[int, TextStream] = {}
        self._stop_ids: dict[int, Collection[int]] = {}  # by request id

    def add(self, request: Request, context: Sequence[int] = ()) -> None:
        """Expect tokens of `request`; its text continues the text of `context`."""
        self._stop_ids[request.id] = self.stop_token_ids(request)
        if self._spelling is not None:
            params = request.params
            # A grammar may demand a space at the beginning.
            keeps_space = bool(params.keep_space or params.constraint is not None or context)
            prompt = request.tokens[: request.num_prompt]
            self._texts[request.id] = TextStream(
                self._spelling.text(prompt, keeps_space), params.stop
            )

    def append(
        self, choice: SampledToken, top: TopLogprobs
    ) -> tuple[TokenOutput, FinishReason | None]:
        """The output for a token that its request got, with the likeliest tokens there; and why the
        request ends, if it does."""
        request, token = choice.request, choice.token
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
        output = TokenOutput(
            request.id,
            token,
            segment,
            choice.logprob,
            top,
            cached_prompt_tokens=request.num_cached,
        )
        return output, reason

    def stop_token_ids(self, request: Request) -> Collection[int]:
        own = request.params.stop_token_ids
        if self.tokenizer is None or request.params.ignore_eos:
            return own
        return own.union(self.tokenizer.eos_token_ids) if own else self.tokenizer.eos_token_ids

    def text_of(self, tokens: Sequence[int], keeps_space: bool = False) -> str:
        """The text of generated tokens, end-of-sequence token excluded; "" without a tokenizer. A
        space at the beginning stays if the text `keeps_space`."""
        if self.tokenizer is None or self._spelling is None:
            return ""
        text = TextStream(self._spelling.text(keeps_space=keeps_space))
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
