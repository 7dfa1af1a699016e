"""What answers requests: mlx-lm's prompts and tools on an engine that runs all of them at once."""

import argparse
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Self

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import CompletionRequest, ModelProvider, ResponseGenerator

from mlx_paged.engine.service import EngineService
from mlx_paged.engine.ticket import Ticket
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.metrics import EngineReading, ServerMetrics, read_engine


class BusyError(Exception):
    """As many completions wait as may."""


class Backend(ResponseGenerator):
    """Takes requests to the engine's thread and their tokens back.

    Of mlx-lm's ResponseGenerator it has how a request becomes token ids. Any thread may use it.

    Args:
        provider: with its model loaded, the one that `service` runs.
        service: runs the engine.
    """

    def __init__(self, provider: ModelProvider, service: EngineService) -> None:
        self.model_provider = provider
        self.service = service
        self.metrics = ServerMetrics(self._read_engine)
        self.tokenizer = provider.tokenizer
        self.text_machine = make_text_state_machine(self.tokenizer)
        self._places = self.cli_args.decode_concurrency + self.cli_args.max_queue
        self._taken = 0
        self._lock = threading.Lock()  # guards _taken
        self._tokenizing = threading.Lock()  # tokenizers are not made for several threads
        newline = self._encode("\n")
        self.xtc_special_tokens = frozenset(newline) | frozenset(self.tokenizer.eos_token_ids)
        self.vocab_size = getattr(getattr(provider.model, "args", None), "vocab_size", None)

    @property
    def is_healthy(self) -> bool:
        """Whether completions can be computed."""
        return self.service.is_running

    @property
    def taken(self) -> int:
        """Completions under way or waiting."""
        return self._taken

    def submit(
        self,
        request: CompletionRequest,
        n: int,
        params: SamplingParams,
        template_args: dict[str, Any] | None = None,
    ) -> "Generation":
        """Start `n` completions of a request.

        Raises:
            ValueError: a prompt that cannot be made, or what the engine refuses.
            BusyError: too many wait.
            RuntimeError: the engine is gone.
        """
        self._take(n)
        try:
            tokens, state = self._prompt(request, template_args)
            self._check(len(tokens), params)
            if n == 1:
                tickets = [self.service.submit(tokens, params)]
            else:
                tickets = self.service.adopt(lambda engine: engine.add_samples(tokens, n, params))
        except BaseException:
            self._give_back(n)
            raise
        return Generation(self, tickets, len(tokens), state)

    def _take(self, n: int) -> None:
        with self._lock:
            if self._taken and self._taken + n > self._places:
                raise BusyError(f"{self._taken} completions are under way or waiting")
            self._taken += n

    def _give_back(self, n: int) -> None:
        with self._lock:
            self._taken -= n

    def _prompt(
        self, request: CompletionRequest, template_args: dict[str, Any] | None
    ) -> tuple[list[int], str]:
        """Token ids, and the state that the text begins in: "normal" or "reasoning"."""
        if isinstance(request.prompt, list):
            return request.prompt, "normal"
        args = argparse.Namespace(chat_template_kwargs=template_args)
        with self._tokenizing:
            try:
                tokens, _, _, state, _ = self._tokenize(self.tokenizer, request, args)
            except Exception as error:  # a template can raise anything about what it is given
                raise ValueError(f"no prompt can be made of the request: {error}") from error
        return list(tokens), state

    def _encode(self, text: str) -> list[int]:
        with self._tokenizing:
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _check(self, num_prompt: int, params: SamplingParams) -> None:
        limit = self.cli_args.max_context
        if limit is not None and num_prompt + params.max_tokens > limit:
            raise ValueError(
                f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} are more than the "
                f"{limit} that a request may have"
            )
        biased = max(dict(params.logit_bias), default=0)
        if self.vocab_size is not None and biased >= self.vocab_size:
            raise ValueError(f"logit_bias: expected token ids below {self.vocab_size}")

    def _read_engine(self) -> EngineReading:
        try:
            return self.service.call(read_engine)
        except RuntimeError:
            return EngineReading({"up": 0})


class Generation:
    """The completions of one request. A context manager: leaving it aborts what goes on.

    Attributes:
        num_prompt: tokens of the prompt.
        state: that the text begins in.
        completions: those that ended and were read, by index.
    """

    def __init__(
        self, backend: Backend, tickets: Sequence[Ticket], num_prompt: int, state: str
    ) -> None:
        self.num_prompt = num_prompt
        self.state = state
        self.completions: dict[int, Completion] = {}
        self._backend = backend
        self._tickets = tickets

    def outputs(self) -> Iterator[tuple[int, TokenOutput]]:
        """Tokens of all completions as they come, each with its completion's index.

        Raises:
            Exception: what ended the service.
        """
        for index, output in self._merged() if len(self._tickets) > 1 else self._single():
            if output.completion is not None:
                self._end(index, output.completion)
            yield index, output

    def abort(self) -> None:
        """End all of it after the step under way; from any thread."""
        for ticket in self._tickets:
            ticket.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()
        self._backend._give_back(len(self._tickets))
        self._backend.metrics.count_abandoned(len(self._tickets) - len(self.completions))

    def _end(self, index: int, completion: Completion) -> None:
        self.completions[index] = completion
        self._backend.metrics.count_completion(completion)

    def _single(self) -> Iterator[tuple[int, TokenOutput]]:
        for output in _to_the_end(self._tickets[0]):
            yield 0, output

    def _merged(self) -> Iterator[tuple[int, TokenOutput]]:
        """A thread for each completion reads it, so that none waits for another's."""
        queue: SimpleQueue[tuple[int, TokenOutput | BaseException | None]] = SimpleQueue()

        def read(index: int, ticket: Ticket) -> None:
            try:
                for output in _to_the_end(ticket):
                    queue.put((index, output))
                queue.put((index, None))
            except BaseException as error:
                queue.put((index, error))

        for index, ticket in enumerate(self._tickets):
            threading.Thread(target=read, args=(index, ticket), daemon=True).start()
        num_open = len(self._tickets)
        while num_open:
            index, output = queue.get()
            if isinstance(output, BaseException):
                raise output
            if output is None:
                num_open -= 1
            else:
                yield index, output


def _to_the_end(ticket: Ticket) -> Iterator[TokenOutput]:
    """A ticket's outputs; the last one has the completion, also if the request was aborted."""
    completion = None
    for output in ticket:
        completion = output.completion
        yield output
    if completion is None:
        yield TokenOutput.last(ticket.result())
