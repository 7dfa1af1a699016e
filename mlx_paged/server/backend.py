"""Turns requests into prompts with mlx-lm's code and runs all of them on one engine."""

import argparse
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Self

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import CompletionRequest, ModelProvider, ResponseGenerator
from prometheus_client.core import Metric

from mlx_paged.engine.service import EngineService
from mlx_paged.engine.ticket import Ticket
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.metrics import ServerMetrics, engine_metrics, up_metric


class BusyError(Exception):
    """The queue of waiting completions is full."""


class Backend(ResponseGenerator):
    """Submits requests to the engine's thread. Any thread may use it.

    It inherits from mlx-lm's ResponseGenerator the conversion of a request to token ids.

    Args:
        provider: has loaded the model that `service` runs.
        service: runs the engine.
    """

    def __init__(self, provider: ModelProvider, service: EngineService) -> None:
        self.model_provider = provider
        self.service = service
        self.metrics = ServerMetrics(self._read_engine)
        self.tokenizer = provider.tokenizer
        self.text_machine = make_text_state_machine(self.tokenizer)
        self._places = self.cli_args.decode_concurrency + self.cli_args.max_queue
        self.taken = 0  # completions that run or wait
        self._lock = threading.Lock()  # guards `taken`
        self._tokenizing = threading.Lock()  # a tokenizer is not thread-safe
        newline = self.tokenizer.encode("\n", add_special_tokens=False)
        self.xtc_special_tokens = frozenset(newline) | frozenset(self.tokenizer.eos_token_ids)

    @property
    def is_healthy(self) -> bool:
        """Whether completions can be computed."""
        return self.service.is_running

    def submit(
        self,
        request: CompletionRequest,
        n: int,
        params: SamplingParams,
        template_args: dict[str, Any] | None = None,
    ) -> "Generation":
        """Start `n` completions of a request.

        Raises:
            ValueError: the request makes no valid prompt, or the engine refuses it.
            BusyError: too many completions wait.
            RuntimeError: the engine has stopped.
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
            self.give_back(n)
            raise
        return Generation(self, tickets, len(tokens), state)

    def _take(self, n: int) -> None:
        with self._lock:
            if self.taken and self.taken + n > self._places:
                raise BusyError(f"{self.taken} completions are under way or waiting")
            self.taken += n

    def give_back(self, n: int) -> None:
        with self._lock:
            self.taken -= n

    def _prompt(
        self, request: CompletionRequest, template_args: dict[str, Any] | None
    ) -> tuple[list[int], str]:
        """Token ids, and the state in which the text begins: "normal" or "reasoning"."""
        if isinstance(request.prompt, list):
            return request.prompt, "normal"
        args = argparse.Namespace(chat_template_kwargs=template_args)
        with self._tokenizing:
            try:
                tokens, _, _, state, _ = self._tokenize(self.tokenizer, request, args)
            except Exception as error:  # a chat template can raise anything
                raise ValueError(f"no prompt can be made of the request: {error}") from error
        return list(tokens), state

    def _check(self, num_prompt: int, params: SamplingParams) -> None:
        limit = self.cli_args.max_context
        if limit is not None and num_prompt + params.max_tokens > limit:
            raise ValueError(
                f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} are more than the "
                f"{limit} that a request may have"
            )

    def _read_engine(self) -> list[Metric]:
        try:
            return self.service.call(engine_metrics)
        except RuntimeError:  # the service has ended
            return [up_metric(False)]


class Generation:
    """The completions of one request. Leaving this context aborts those that still run."""

    def __init__(
        self, backend: Backend, tickets: Sequence[Ticket], num_prompt: int, state: str
    ) -> None:
        self.num_prompt = num_prompt  # tokens
        self.state = state  # in which the text begins
        self.completions: dict[int, Completion] = {}  # that ended and were read, by index
        self._backend = backend
        self._tickets = tickets

    def outputs(self) -> Iterator[tuple[int, TokenOutput]]:
        """Tokens of all completions as they come, each with the index of its completion.

        Raises:
            Exception: the error that ended the service.
        """
        is_single = len(self._tickets) == 1
        alone = ((0, output) for output in _to_the_end(self._tickets[0]))
        for index, output in alone if is_single else self._merged():
            if output.completion is not None:
                self.completions[index] = output.completion
                self._backend.metrics.count_completion(output.completion)
            yield index, output

    def abort(self) -> None:
        """End all completions after the current step. Any thread may call this."""
        for ticket in self._tickets:
            ticket.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()
        self._backend.give_back(len(self._tickets))
        self._backend.metrics.count_abandoned(len(self._tickets) - len(self.completions))

    def _merged(self) -> Iterator[tuple[int, TokenOutput]]:
        """Reads each completion in a thread of its own, so that none waits for another."""
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
    """A ticket's outputs. The last one has the completion, also after an abort."""
    completion = None
    for output in ticket:
        completion = output.completion
        yield output
    if completion is None:
        yield TokenOutput.last(ticket.result())
