"""Calls of an engine that step it until their requests have ended. Knows no mlx."""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.arguments import is_whole, require, shown
from mlx_paged.engine.core import EngineCore
from mlx_paged.engine.one_thread import exclusive, exclusive_as
from mlx_paged.engine.text import Prompt, prompt_list
from mlx_paged.outputs import Completion, TokenOutput, likeliest
from mlx_paged.sampling_params import SamplingParams

OnOutput = Callable[[TokenOutput], None]


@dataclass(slots=True, eq=False)
class _Stream:
    """What a waiting call, or the reader of a stream, gets of the requests that it added.

    Attributes:
        outputs: that it has not read yet.
        completions: by request id, of requests that have ended.
    """

    outputs: deque[TokenOutput] = field(default_factory=deque)
    completions: dict[int, Completion] = field(default_factory=dict)


class WaitingCalls(EngineCore):
    """Adds requests and steps the engine until they have ended, or reads token by token.

    Whichever call computes a step, each output goes to the call or the stream that added its
    request. :meth:`step` returns the outputs of all other requests.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams: dict[int, _Stream] = {}  # by request id
        self._dropped: deque[int] = deque()  # ids of streams that have no reader any more

    def compute(self) -> None:
        if self._dropped:
            self._abort_dropped()
        super().compute()

    def is_open(self, request_id: int) -> bool:
        stream = self._streams.get(request_id)
        unread = () if stream is None else stream.outputs
        return super().is_open(request_id) or any(o.request_id == request_id for o in unread)

    def abort(self, request_id: int) -> Completion | None:
        completion = super().abort(request_id)
        if completion is not None and request_id in self._streams:
            self._streams[request_id].completions[request_id] = completion
        return completion

    def _deliver(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            super()._deliver(output)
        else:
            stream.outputs.append(output)

    @exclusive
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: OnOutput | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete all prompts; return the completions in the order of the prompts.

        Args:
            prompts: texts or token ids. One text, or the token ids of one prompt, give a list of
                one completion.
            params: for all prompts, or a sequence with one entry for each prompt.
            on_output: called with every token when it is known.

        Raises:
            ValueError: as :meth:`add_request`; no prompt is computed then.
        """
        prompts = prompt_list("generate", prompts)
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"[generate] {len(prompts)} prompts but {len(each)} params: expected one each"
            )
        return self._complete(
            (
                [self.add_request(prompt, param, **options)]
                for prompt, param in zip(prompts, each, strict=True)
            ),
            on_output,
        )

    @exclusive
    def sample(
        self,
        prompts: Prompt | Iterable[Prompt],
        n: int,
        params: SamplingParams | None = None,
        best_of: int | None = None,
        on_output: OnOutput | None = None,
        **options: Any,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, e.g. for policy-gradient methods such as GRPO.

        Every prompt is computed once and its K/V is shared. With a seed s, completion i of each
        prompt draws the same as a request with seed ``s + i``.

        Args:
            prompts: as of :meth:`generate`. One prompt gives a list of one list.
            best_of: generate this many and return the `n` completions with the highest mean
                log-probability, best first.

        More than one completion at temperature 0 gives a UserWarning: they are equal.

        Raises:
            ValueError: `n` above `best_of`, or as :meth:`add_samples`; nothing is computed then.
        """
        prompts = prompt_list("sample", prompts)
        count = n if best_of is None else best_of
        if not (is_whole(n, 1) and is_whole(count, n)):
            given = f"n is {shown(n)} and best_of {shown(best_of)}"
            raise ValueError(f"[sample] {given}: expected 1 <= n <= best_of")
        temperature = options.get("temperature", (params or SamplingParams()).temperature)
        if count > 1 and temperature == 0:
            message = f"[sample] temperature is 0: all {count} completions of a prompt are equal"
            warnings.warn(message, stacklevel=3)  # the caller of the guarded method
        done = self._complete(
            (self.add_samples(prompt, count, params, **options) for prompt in prompts), on_output
        )
        groups = [done[i : i + count] for i in range(0, len(done), count)]
        if best_of is None:
            return groups
        return [likeliest(group, n) for group in groups]

    @exclusive
    def beam_search(
        self, prompt: Prompt, num_beams: int, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The best continuation that a beam search finds; ``.beams`` has all of them.

        Arguments and errors are those of :meth:`add_beam_search`.
        """
        ids = ([self.add_beam_search(prompt, num_beams, params, **options)] for _ in range(1))
        return self._complete(ids, None)[0]

    @exclusive
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[TokenOutput]:
        """Add a request and yield each of its tokens; other requests advance meanwhile.

        This call adds the request, not the first ``next``. Closing the iterator or dropping the
        last reference to it aborts the request, also before the first ``next``.

        Raises:
            ValueError: as :meth:`add_request`, at once.
        """
        request_id = self.add_request(prompt, params, **options)
        outputs = self._stream_outputs(request_id)
        next(outputs)  # a generator that was never started would not reach its `finally`
        return outputs

    def _complete(self, added: Iterator[list[int]], on_output: OnOutput | None) -> list[Completion]:
        """Add requests and wait for all of them, within an exclusive method."""
        is_callable = on_output is None or callable(on_output)
        require(is_callable, "generate", "on_output", on_output, "a callable or None")
        ids: list[int] = []
        stream = _Stream()
        try:
            for batch in added:
                ids += batch
                self._streams |= dict.fromkeys(batch, stream)
            while stream.outputs or len(stream.completions) < len(ids):
                if not stream.outputs:
                    self.compute()
                    continue
                output = stream.outputs.popleft()
                if output.completion is not None:
                    stream.completions[output.request_id] = output.completion
                if on_output is not None:
                    on_output(output)
            return [stream.completions[request_id] for request_id in ids]
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        finally:
            for request_id in ids:
                self._streams.pop(request_id, None)
            self._abort_dropped()

    def _stream_outputs(self, request_id: int) -> Generator[Any]:
        """First None, when the stream is ready; then the outputs of the request."""
        stream = self._streams[request_id] = _Stream()
        try:
            yield
            while True:
                while stream.outputs:
                    output = stream.outputs.popleft()
                    yield output
                    if output.completion is not None:
                        return
                if stream.completions:  # aborted by another caller
                    return
                self.compute()
        finally:
            self._dropped.append(request_id)
            # The garbage collector may run this inside any other call, in any thread. Then the
            # next step aborts the request.
            if self.occupancy.thread is None:
                self._abort_dropped()

    @exclusive_as("close of a stream")
    def _abort_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self.abort(request_id)
            self._streams.pop(request_id, None)
