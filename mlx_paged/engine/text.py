"""Chosen tokens to what callers see: text, ends, completions. Knows no mlx."""

from collections.abc import Callable, Collection, Sequence

from mlx_paged.engine.pipeline import Choice
from mlx_paged.engine.prompt_encoder import Tokenizer
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason, Request


class OutputProcessor:
    """Appends chosen tokens to their requests, finds out which of these end, and makes text.

    Args:
        tokenizer: None: no text, and no token ends a request unless it says so itself.
        clock: seconds.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self.tokenizer = tokenizer
        self._clock = clock
        self._texts: dict[int, TextStream] = {}
        self._ends: dict[int, Collection[int]] = {}  # by request, tokens that end it

    def add(self, request: Request, context: Sequence[int] = ()) -> None:
        """Expect tokens of `request`, whose text goes on where that of `context` ended."""
        self._ends[request.id] = self.stop_token_ids(request)
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer
            self._texts[request.id] = TextStream(detokenizer, request.params.stop, context)

    def append(self, choice: Choice) -> tuple[TokenOutput, FinishReason | None]:
        """Take in a token; says whether and why the request ends with it."""
        request, token = choice.request, choice.token
        request.tokens.append(token)
        request.logprobs.append(choice.logprob)
        text = self._texts.get(request.id)
        ends = token in self._ends[request.id]
        segment = "" if text is None or ends else text.push(token)
        reason = None
        if ends or (text is not None and text.stopped):
            reason = FinishReason.STOP
        elif len(request.tokens) - request.num_prompt == request.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and text is not None:
            segment += text.finish()
        top = choice.top[: request.params.logprobs] if choice.top else ()
        if top:
            request.top_logprobs.append(top)
        return TokenOutput(request.id, token, segment, choice.logprob, top), reason

    def stop_token_ids(self, request: Request) -> Collection[int]:
        """Tokens that end the request."""
        if self.tokenizer is None or request.params.ignore_eos:
            return request.params.stop_token_ids
        if not request.params.stop_token_ids:
            return self.tokenizer.eos_token_ids
        return request.params.stop_token_ids.union(self.tokenizer.eos_token_ids)

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
        """The whole of a request that ends now."""
        text = self.forget(request)
        request.finish_reason = reason
        request.finish_time = self._clock()
        return Completion.of(request, "" if text is None else text.text)

    def forget(self, request: Request) -> TextStream | None:
        """Expect no more tokens of a request; its text so far."""
        self._ends.pop(request.id, None)
        return self._texts.pop(request.id, None)
