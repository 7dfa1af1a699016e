"""How the tokens of a request are to be chosen. Knows no mlx."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

PROBABILITIES = ("top_p", "min_p", "xtc_probability")
COUNTS = (
    "top_k",
    "repetition_context_size",
    "presence_context_size",
    "frequency_context_size",
    "logprobs",
)
ADDITIVE_PENALTIES = ("presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    What the model says about the next token passes through the options in mlx-lm's order: logit
    bias, repetition, presence and frequency penalty and the caller's own processors change the
    logits, of which a token's reported log-probability is made. Then top-p, min-p, XTC and top-k
    drop tokens, and the temperature applies to those left. At temperature 0 nothing is dropped.

    Args:
        max_tokens: tokens to generate at most (>= 1).
        temperature: 0 takes the most likely token; above 0 samples from ``p ** (1 / temperature)``.
        top_p: nucleus mass in (0, 1]; 0 or 1 keeps everything (0 as in mlx-lm).
        top_k: how many of the most likely tokens are kept; 0 keeps everything.
        min_p: tokens below ``min_p`` times the largest probability are dropped; 0 keeps everything.
        xtc_probability: how often XTC acts on a token; 0 never.
        xtc_threshold: of the tokens more likely than this, in [0, 0.5], XTC keeps the least likely.
        xtc_special_tokens: tokens that XTC never drops.
        repetition_penalty: divides the logits above 0 and multiplies those below 0 of tokens seen;
            None, 0 or 1 is off.
        repetition_context_size: how many tokens back count as seen, prompt included; 0 takes all.
        presence_penalty: subtracted from the logits of tokens seen; None or 0 is off.
        presence_context_size: as `repetition_context_size`.
        frequency_penalty: subtracted once for every time that a token was seen; None or 0 is off.
        frequency_context_size: as `repetition_context_size`.
        logit_bias: added to the logits of tokens, from token to number (-inf forbids the token), or
            pairs of these; kept as a tuple of pairs.
        logits_processors: called in turn as ``processor(tokens, logits)`` with the prompt and what
            was generated since, ``[n]`` int32, and the next token's logits ``[1, vocab]``, both
            mx.array; returns logits of the same shape. As in mlx-lm. One that raises, or leaves no
            token but NaN and -inf, ends its request with an error. They should not evaluate
            either: that makes the engine wait for the model.
        sampler: chooses the token instead of temperature and filters, which must be left as they
            are: called as ``sampler(logprobs)`` with log-probabilities ``[1, vocab]``, an mx.array,
            returns the token id, an mx.array ``[1]`` of integers. As in mlx-lm. It should not
            evaluate anything; where it draws, `seed` has no part in it.
        seed: the request's own random stream. None takes one from the engine's. A seeded request
            draws the same numbers whoever shares its batch.
        logprobs: how many of the most likely tokens are reported with each token.
        stop: strings that end the request; the text ends before the first of them.
        stop_token_ids: tokens that end the request, beside the tokenizer's end-of-sequence tokens.
        ignore_eos: go on past the tokenizer's end-of-sequence tokens.

    Raises:
        ValueError: a value outside its range, naming the field and what would do.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: frozenset[int] = frozenset()
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logits_processors: tuple[Callable[..., Any], ...] = ()
    sampler: Callable[..., Any] | None = None
    seed: int | None = None
    logprobs: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._freeze_collections()
        self._check_numbers()
        self._check_collections()

    def _freeze_collections(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name in ("stop", "logits_processors", "logit_bias"):
            self._freeze(name, tuple)
        for name in ("stop_token_ids", "xtc_special_tokens"):
            self._freeze(name, frozenset)

    def _freeze(self, name: str, collection: Callable[[Iterable[Any]], object]) -> None:
        value = getattr(self, name)
        is_collection = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        _require(is_collection, self, name, "a collection")
        try:
            object.__setattr__(self, name, collection(value))
        except TypeError:  # a set of what cannot be hashed
            _require(False, self, name, "a collection of token ids")

    def _check_numbers(self) -> None:
        _require(is_count(self.max_tokens, 1), self, "max_tokens", "an integer >= 1")
        for name in COUNTS:
            _require(is_count(getattr(self, name)), self, name, "an integer >= 0")
        _require(_is_within(self.temperature, 0), self, "temperature", ">= 0 and finite")
        for name in PROBABILITIES:
            _require(_is_within(getattr(self, name), 0, 1), self, name, "from 0 to 1")
        _require(_is_within(self.xtc_threshold, 0, 0.5), self, "xtc_threshold", "from 0 to 0.5")
        _require(
            self.repetition_penalty is None or _is_within(self.repetition_penalty, 0),
            self,
            "repetition_penalty",
            "None, or >= 0 and finite",
        )
        for name in ADDITIVE_PENALTIES:
            penalty = getattr(self, name)
            _require(penalty is None or _is_within(penalty), self, name, "None or a finite number")
        _require(
            self.seed is None or (is_count(self.seed) and self.seed < 2**64),
            self,
            "seed",
            "an integer in [0, 2**64)",
        )
        _require(isinstance(self.ignore_eos, bool), self, "ignore_eos", "True or False")

    def _check_collections(self) -> None:
        _require(
            all(isinstance(s, str) and s for s in self.stop), self, "stop", "non-empty strings"
        )
        for name in ("stop_token_ids", "xtc_special_tokens"):
            _require(all(map(is_whole, getattr(self, name))), self, name, "token ids >= 0")
        _require(
            all(map(_is_bias, self.logit_bias)),
            self,
            "logit_bias",
            "numbers below infinity by token id >= 0",
        )
        _require(all(map(callable, self.logits_processors)), self, "logits_processors", "callables")
        _require(self.sampler is None or callable(self.sampler), self, "sampler", "a callable")
        _require(
            self.sampler is None or not self.temperature,
            self,
            "sampler",
            "None beside a temperature above 0",
        )


def check_biases(params: SamplingParams, vocab: int) -> None:
    """Refuse biases of tokens that do not exist.

    Raises:
        ValueError: naming the largest of them.
    """
    largest = max(dict(params.logit_bias), default=0)
    if largest >= vocab:
        raise ValueError(
            f"[SamplingParams] logit_bias names token {largest}: expected token ids below {vocab}"
        )


def is_count(value: object, least: int = 0) -> bool:
    """Whether `value` is an integer that is not too small; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_whole(value: object, least: int = 0) -> bool:
    """As :func:`is_count`, and NumPy's integers count."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_real(value: object) -> bool:
    """Whether `value` is a number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_within(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether `value` is a finite number of ``[low, high]``."""
    if not isinstance(value, Real) or not is_real(value):
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
    return is_count(token) and (_is_within(bias) or bias == -math.inf)


def _require(condition: bool, params: SamplingParams, name: str, expected: str) -> None:
    if not condition:
        raise ValueError(
            f"[SamplingParams] {name} is {getattr(params, name)!r}: expected {expected}"
        )
