"""How the tokens of a request are to be chosen. Knows no mlx."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from mlx_paged.arguments import is_count, is_real, is_whole, require, suggesting_fields

T = TypeVar("T")

WEEK = 7 * 24 * 60 * 60
"""Seconds that K/V may be retained at most."""

_Range = tuple[Callable[[Any], bool], str]
"""Whether a value of a field is valid, and the valid values in words."""


def is_within(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether `value` is a finite number of ``[low, high]``."""
    if not is_real(value):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return math.isfinite(number) and low <= number <= high


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    token, bias = pair
    return is_count(token) and (is_within(bias) or bias == -math.inf)


def _field(default: T, is_valid: Callable[[Any], bool], expected: str) -> T:
    made: T = field(default=default, metadata={"range": (is_valid, expected)})
    return made


_COUNT: _Range = (is_count, "an integer >= 0")
_COUNT_OR_NONE: _Range = (lambda x: x is None or is_count(x), "None or an integer >= 0")
_PROBABILITY: _Range = (lambda x: is_within(x, 0, 1), "from 0 to 1")
_DIVISOR: _Range = (lambda x: x is None or is_within(x, 0), "None, or >= 0 and finite")
_PENALTY: _Range = (lambda x: x is None or is_within(x), "None or a finite number")
_SEED: _Range = (lambda x: x is None or (is_count(x) and x < 2**64), "an integer in [0, 2**64)")
_TEXT: _Range = (lambda x: x is None or (isinstance(x, str) and bool(x)), "None or a text")
_TEXTS: _Range = (lambda x: all(isinstance(s, str) and s for s in x), "non-empty strings")
_BIASES: _Range = (lambda x: all(map(_is_bias, x)), "numbers below infinity by token id >= 0")
_TOKEN_IDS: _Range = (lambda ids: all(map(is_whole, ids)), "token ids >= 0")
_SCHEMA: _Range = (_TEXT[0], "None, a mapping or JSON text")
_CALLABLE: _Range = (lambda x: x is None or callable(x), "a callable")
_CALLABLES: _Range = (lambda x: all(map(callable, x)), "callables")
_RETAIN: _Range = (
    lambda x: x in (None, "pin", "drop") if isinstance(x, str | None) else is_within(x, 0, WEEK),
    f'None, "pin", "drop" or seconds from 0 to {WEEK}',
)
_SWITCH: _Range = (lambda x: isinstance(x, bool), "True or False")
_CHOICE: _Range = (lambda x: isinstance(x, bool | None), "True, False or None")


@suggesting_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The options apply in mlx-lm's order. First logit bias, repetition, presence and frequency
    penalty and the caller's own processors change the logits; a token's reported log-probability
    is computed from these. Then top-p, min-p, XTC and top-k drop tokens, and the temperature
    applies to the remaining ones. At temperature 0 nothing is dropped.

    Args:
        max_tokens: tokens to generate at most (>= 1).
        temperature: 0 takes the most likely token; above 0 samples from ``p ** (1 / temperature)``.
        top_p: nucleus mass in (0, 1]; 0 or 1 keeps everything (0 as in mlx-lm).
        top_k: how many of the most likely tokens are kept; 0 keeps everything.
        min_p: tokens below ``min_p`` times the largest probability are dropped; 0 keeps everything.
        xtc_probability: probability that XTC acts on a token.
        xtc_threshold: XTC keeps only the least likely of the tokens above this probability,
            in [0, 0.5].
        xtc_special_tokens: tokens that XTC never drops.
        repetition_penalty: divides the positive logits of tokens seen and multiplies the negative
            ones; None, 0 or 1 is off.
        repetition_context_size: how many tokens back count as seen, prompt included; 0 takes all.
        presence_penalty: subtracted from the logits of tokens seen; None or 0 is off.
        presence_context_size: as `repetition_context_size`.
        frequency_penalty: subtracted once for each time a token was seen; None or 0 is off.
        frequency_context_size: as `repetition_context_size`.
        logit_bias: number added to the logit of each token id, as a mapping or as pairs; -inf
            forbids the token. Biases and penalties leave a finite logit between plus and minus a
            quarter of the largest number of the logits' type (float16: 16,376). Stored as a tuple
            of pairs.
        logits_processors: each is called in order as ``processor(tokens, logits)``. `tokens` are
            the prompt and the generated tokens, ``[n]`` int32; `logits` are the next token's,
            ``[1, vocab]``; both are mx.array. It returns logits of the same shape, as in mlx-lm.
            If one raises, or leaves only NaN and -inf, its request ends with an error. A processor
            should not evaluate arrays: the engine would then wait for the model.
        sampler: chooses the token in place of temperature and filters; `temperature` must be 0.
            It is called as ``sampler(logprobs)`` with log-probabilities ``[1, vocab]``, an
            mx.array, and returns the token id, an mx.array ``[1]`` of integers, as in mlx-lm. It
            should not evaluate arrays. It does not use `seed`.
        seed: of the request's random stream; None: the engine chooses one. A request with a seed
            draws the same numbers in any batch.
        logprobs: how many of the most likely tokens are reported with each token. A forbidden token
            is not among these tokens.
        prompt_logprobs: how many of the most likely tokens are reported with each prompt token,
            beside the token's own log-probability, which nothing above changes; None: no prompt
            token has one. Tokens that the logits do not have get none. A fork has them for the
            tokens that are computed for it.
        prompt_logprobs_from: the first prompt token that has one. Tokens before it may come from
            the prefix cache; later ones, and always the last one, are computed.
        stop: strings that end the request; the text ends before the first of them.
        stop_token_ids: tokens that end the request, in addition to the end-of-sequence tokens.
        ignore_eos: continue after the tokenizer's end-of-sequence tokens.
        keep_space: True keeps a space that the text begins with, so that the text continues the
            prompt's text. False drops the space, as mlx-lm does. None: True if the prompt is text,
            False if it is token ids or a chat.
        speculate: compute drafts of its tokens, if the engine does so. Requests with a sampler or
            processors of their caller, which may keep a state, never have drafts.
        json_schema: the text is JSON that this schema describes, a mapping or JSON text; stored as
            text. docs/structured-outputs.md has the rules of this field and the next two.
        regex: the whole text matches this regular expression, in Rust's syntax.
        grammar: the text follows this grammar, in llguidance's form of Lark.
        adapter: name of an adapter of the engine, whose terms the model's layers add for this
            request (docs/adapters.md); None: none.
        retain: what becomes of the K/V of prompt and answer when the request has ended. A number of
            seconds, at most a week, or "pin": other cached K/V is evicted first, within the share
            of the pool that an owner may pin. "drop": it is forgotten, unless others use it.

    Raises:
        ValueError: a value is outside its range; the message names the field and the range.
    """

    max_tokens: int = _field(256, lambda x: is_count(x, 1), "an integer >= 1")
    temperature: float = _field(0.0, lambda x: is_within(x, 0), ">= 0 and finite")
    top_p: float = _field(1.0, *_PROBABILITY)
    top_k: int = _field(0, *_COUNT)
    min_p: float = _field(0.0, *_PROBABILITY)
    xtc_probability: float = _field(0.0, *_PROBABILITY)
    xtc_threshold: float = _field(0.1, lambda x: is_within(x, 0, 0.5), "from 0 to 0.5")
    xtc_special_tokens: frozenset[int] = _field(frozenset(), *_TOKEN_IDS)
    repetition_penalty: float | None = _field(None, *_DIVISOR)
    repetition_context_size: int = _field(20, *_COUNT)
    presence_penalty: float | None = _field(None, *_PENALTY)
    presence_context_size: int = _field(20, *_COUNT)
    frequency_penalty: float | None = _field(None, *_PENALTY)
    frequency_context_size: int = _field(20, *_COUNT)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = _field((), *_BIASES)
    logits_processors: tuple[Callable[..., Any], ...] = _field((), *_CALLABLES)
    sampler: Callable[..., Any] | None = _field(None, *_CALLABLE)  # noqa: RUF009
    seed: int | None = _field(None, *_SEED)
    logprobs: int = _field(0, *_COUNT)
    prompt_logprobs: int | None = _field(None, *_COUNT_OR_NONE)
    prompt_logprobs_from: int = _field(0, *_COUNT)
    stop: tuple[str, ...] = _field((), *_TEXTS)
    stop_token_ids: frozenset[int] = _field(frozenset(), *_TOKEN_IDS)
    ignore_eos: bool = _field(False, *_SWITCH)
    keep_space: bool | None = _field(None, *_CHOICE)
    speculate: bool = _field(True, *_SWITCH)
    json_schema: Mapping[str, Any] | str | None = _field(None, *_SCHEMA)
    regex: str | None = _field(None, *_TEXT)
    grammar: str | None = _field(None, *_TEXT)
    adapter: str | None = _field(None, *_TEXT)
    retain: float | str | None = _field(None, *_RETAIN)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _json(self.json_schema))
        for each in fields(self):
            if isinstance(each.default, tuple | frozenset):
                self._freeze(each.name, type(each.default))
            (is_valid, expected), value = each.metadata["range"], getattr(self, each.name)
            require(is_valid(value), "SamplingParams", each.name, value, expected)
        one_choice = self.sampler is None or not self.temperature
        beside = "None beside a temperature above 0"
        require(one_choice, "SamplingParams", "sampler", self.sampler, beside)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"[SamplingParams] {' and '.join(given)} are given: expected one")
        if given and self.ignore_eos:
            raise ValueError(
                f"[SamplingParams] ignore_eos is True beside {given[0]}: expected False, because a "
                "grammar ends with an end-of-sequence token"
            )

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The name and the value of the field that constrains the text, if one does."""
        given = ((name, getattr(self, name)) for name in CONSTRAINTS)
        return next(((name, source) for name, source in given if source is not None), None)

    @property
    def speculates(self) -> bool:
        """Whether its tokens may be computed ahead."""
        is_free = self.sampler is None and not self.logits_processors
        return self.speculate and is_free

    def _freeze(self, name: str, collection: Callable[[Iterable[Any]], object]) -> None:
        value = getattr(self, name)
        is_collection = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        require(is_collection, "SamplingParams", name, value, "a collection")
        try:
            object.__setattr__(self, name, collection(value))
        except TypeError:  # a set of values that cannot be hashed
            require(False, "SamplingParams", name, value, "a collection of token ids")


def check_biases(params: SamplingParams, vocab: int) -> None:
    """Raise ValueError if `logit_bias` names a token that the vocabulary does not have."""
    largest = max(dict(params.logit_bias), default=0)
    if largest >= vocab:
        raise ValueError(
            f"[SamplingParams] logit_bias names token {largest}: expected token ids below {vocab}"
        )


def _json(value: object) -> object:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return value  # refused by its range


class CompilerBusy(RuntimeError):
    """Too many grammars wait for the compiler."""


CONSTRAINTS = ("json_schema", "regex", "grammar")  # fields of which one may constrain the text

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in one line, as Python writes it. A schema's own "x-guidance" overrides this."""


def chosen_by_caller(params: SamplingParams, num_candidates: int) -> SamplingParams:
    """`params` for a request whose caller chooses each token among so many candidates, so that no
    token can be computed ahead."""
    return replace(params, logprobs=num_candidates, speculate=False)
