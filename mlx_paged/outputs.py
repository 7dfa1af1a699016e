"""What an engine gives back: tokens as they come, and the whole when a request ended."""

from dataclasses import dataclass

from mlx_paged.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that ended.

    Attributes:
        request_id: as :meth:`Engine.add_request` returned it.
        prompt_tokens: how many tokens the prompt had.
        tokens: what was generated, an end-of-sequence token included.
        text: the same as text, without end-of-sequence token and stop string; empty without a
            tokenizer.
        logprobs: log-probability of each token under the model, before temperature and filters.
        finish_reason: why it ended.
        ttft_s: seconds from arrival to the first token; None if there was none.
        seconds: from arrival to the end.
        cached_prompt_tokens: prompt tokens whose K/V another request had left.
        preemptions: how often its K/V was given up and computed again.
    """

    request_id: int
    prompt_tokens: int
    tokens: list[int]
    text: str
    logprobs: list[float]
    finish_reason: FinishReason
    ttft_s: float | None
    seconds: float
    cached_prompt_tokens: int
    preemptions: int

    @classmethod
    def of(cls, request: Request, text: str) -> "Completion":
        """The result of a finished request."""
        assert request.finish_reason is not None and request.finish_time is not None
        first = request.first_token_time
        return cls(
            request_id=request.id,
            prompt_tokens=request.num_prompt,
            tokens=request.generated,
            text=text,
            logprobs=request.logprobs,
            finish_reason=request.finish_reason,
            ttft_s=None if first is None else first - request.arrival_time,
            seconds=request.finish_time - request.arrival_time,
            cached_prompt_tokens=request.num_cached,
            preemptions=request.num_preempted,
        )


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One more token of one request.

    Attributes:
        text: text that became certain with this token; may be empty.
        completion: set on a request's last output.
    """

    request_id: int
    token: int
    text: str
    logprob: float
    completion: Completion | None = None
