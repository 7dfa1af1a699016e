"""What was computed for a request, in numbers and times: what observers of requests are told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.protocol.fields import Fields

MOST_REASONS = 16  # choices whose finish reasons are told
MAX_INT64 = 2**63 - 1
OPTIONS = (
    *("max_tokens", "temperature", "top_p", "top_k"),
    *("frequency_penalty", "presence_penalty"),
)
"""Numbers of a request, by their names in chat completions and in the GenAI conventions."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What was computed for a request. Times are those of ``time.monotonic``; None: it did not come
    to this, or the client left before its completions ended.

    Attributes:
        model: the name that the model, or the adapter, is served under.
        options: numbers that the request gave, and whether it asked for a stream.
        finish_reasons: of its first choices, in the API's names.
        submitted: when its first prompt was given to the engine.
        begun: when the engine admitted the first of its prompts.
        first_token: when the engine had the first token of any choice.
        ended: when the engine had the last one.
        failed: whether its stream ended with an error.
    """

    model: str
    options: Mapping[str, int | float | bool]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]
    submitted: float | None
    begun: float | None
    first_token: float | None
    ended: float | None
    failed: bool


def options_of(fields: Fields) -> dict[str, int | float | bool]:
    """The numbers of a request that gives them, as far as they fit into 64 bits."""
    given = {name: fields.get(name) for name in OPTIONS}
    found: dict[str, int | float | bool] = {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float) and abs(value) <= MAX_INT64
    }
    return found | {"choice.count": int(fields["n"]), "stream": bool(fields["stream"])}


def reasons_of(choices: Sequence[CompletionChoice]) -> tuple[str, ...]:
    return tuple(str(c.finish_reason or c.engine_reason) for c in choices[:MOST_REASONS])


def times_of(
    choices: Sequence[CompletionChoice], submitted: Mapping[int, float]
) -> dict[str, float | None]:
    """The times of :class:`Computed` that the completions of some choices tell. `submitted` says
    when each of them was given to the engine, by its index."""
    done = [
        (submitted[c.index], c.completion)
        for c in choices
        if c.completion is not None and c.index in submitted
    ]
    begun = [at + c.queue_s for at, c in done if c.queue_s is not None]
    first = [at + c.ttft_s for at, c in done if c.ttft_s is not None]
    return {
        "submitted": min(submitted.values(), default=None),
        "begun": min(begun, default=None),
        "first_token": min(first, default=None),
        "ended": max((at + c.seconds for at, c in done), default=None),
    }
