"""What an engine returns: single tokens, and the completion when a request has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mlx_paged.kv.pins import Pinned
from mlx_paged.request import FinishReason, PromptLogprob, Request


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls in its answer to a chat.

    Attributes:
        arguments: text of a JSON object, as the model wrote it where its format has JSON.
        id: the model's own name of the call, if its format has one.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis of a beam search.

    Attributes:
        score: sum of the log-probabilities divided by ``length ** length_penalty``.
        finish_reason: STOP or LENGTH.
    """

    tokens: list[int]
    text: str
    logprobs: list[float]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request that ended.

    Attributes:
        request_id: as :meth:`Engine.add_request` returned it.
        prompt_tokens: number of prompt tokens.
        tokens: generated tokens, including an end-of-sequence token.
        text: of these tokens, without end-of-sequence token and stop string; empty without a
            tokenizer. Of an answer to a chat, what the model says beside its thoughts and calls.
        reasoning: what the model thought before it answered a chat.
        tool_calls: the functions that an answer to a chat calls, in the model's order.
        logprobs: log-probability of each token, before temperature and filters.
        top_logprobs: for each token the most likely ones, as in :class:`TokenOutput`; empty unless
            requested.
        prompt_logprobs: for each prompt token its log-probability, its rank and the most likely
            ones; None for the first, and for tokens before `prompt_logprobs_from`. Empty unless
            requested.
        ttft_s: seconds from arrival to the first token; None without a token.
        queue_s: seconds from arrival to the start; None if it had none of its own, as a sample.
        seconds: from arrival to the end.
        cached_prompt_tokens: prompt tokens found in the prefix cache.
        preemptions: how often the request was preempted.
        drafts: guessed tokens that were computed; `accepted_drafts` of these were right.
        prefix_miss: why no more prompt tokens were found in the prefix cache, a
            :class:`MissReason` or "on_disk"; None if all reusable tokens were found.
        pinned: how many leading tokens stay in the prefix cache as `retain` asks, and why no more;
            None if it does not ask.
        error: the error message, for FinishReason.ERROR.
        beams: all hypotheses of a beam search, best first; tokens, text and logprobs are those of
            the first.
        adapter: name of the request's adapter, and `adapter_version` a hash of its numbers: all
            tokens come from this version.
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
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prefix_miss: str | None = None
    error: str | None = None
    beams: tuple[Beam, ...] = ()
    drafts: int = 0
    accepted_drafts: int = 0
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()
    queue_s: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    adapter: str | None = None
    adapter_version: str | None = None
    pinned: Pinned | None = None

    @classmethod
    def of(cls, request: Request, text: str) -> "Completion":
        """The completion of a finished request."""
        assert request.finish_reason is not None and request.finish_time is not None
        first, admitted = request.first_token_time, request.admitted_time
        variant = request.variant
        ended_badly = request.finish_reason is FinishReason.ERROR
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
            top_logprobs=tuple(request.top_logprobs),
            prefix_miss=request.prefix_miss,
            pinned=request.pinned,
            **request.reported,
            prompt_logprobs=tuple(request.prompt_logprobs or ()),
            queue_s=None if admitted is None else admitted - request.arrival_time,
            adapter=None if variant is None else variant.name,
            adapter_version=None if variant is None else variant.key.hex(),
            error=describe(request.error) if ended_badly and request.error else None,
        )


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The next token of one request.

    Attributes:
        token: None in the last output of a beam search or of a request that failed.
        text: text that is final with this token; may be empty.
        top_logprobs: the ``SamplingParams.logprobs`` most likely tokens and their
            log-probabilities, best first.
        completion: None before the request's last output.
        cached_prompt_tokens: as in :class:`Completion`.
        reasoning: text of the model's thoughts that is final with this token of an answer to a
            chat; `text` has none of it.
        tool_calls: calls that are complete with this token of an answer to a chat.
    """

    request_id: int
    token: int | None
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    completion: Completion | None = None
    cached_prompt_tokens: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def last(cls, completion: Completion) -> "TokenOutput":
        """The last output of a request, without a token."""
        cached = completion.cached_prompt_tokens
        return cls(completion.request_id, None, "", 0.0, (), completion, cached)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def likeliest(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The `n` with the highest mean log-probability, best first."""
    return sorted(completions, key=lambda c: fmean(c.logprobs or (0.0,)), reverse=True)[:n]
