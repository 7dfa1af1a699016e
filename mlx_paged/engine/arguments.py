"""Arguments of what an engine can add, checked before anything is added. Knows no mlx."""

from dataclasses import dataclass
from typing import Any

from mlx_paged.engine.text import PromptEncoder
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams, check_biases, is_count, is_real, is_whole


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a request stands among the others: fields of :class:`Request`."""

    priority: int
    salt: bytes
    keep: bool = False

    @classmethod
    def of(cls, caller: str, priority: int, cache_salt: str, keep: bool = False) -> "Placing":
        """What a caller gave.

        Raises:
            ValueError: naming the argument that is of a wrong kind.
        """
        is_ordered = is_real(priority) and priority == priority  # NaN has no place in an order
        _require(is_ordered, caller, "priority", priority, "a number")
        _require(isinstance(cache_salt, str), caller, "cache_salt", cache_salt, "a string")
        _require_flag(caller, "keep", keep)
        return cls(priority, cache_salt.encode(), keep)

    @classmethod
    def beside(cls, parent: Request, keep: bool) -> "Placing":
        """That of a fork; ValueError as :meth:`of`."""
        _require_flag("fork", "keep", keep)
        return cls(parent.priority, parent.salt, keep)

    def apply(self, request: Request) -> None:
        request.priority, request.salt, request.keep_blocks = self.priority, self.salt, self.keep


def checked_params(
    caller: str, params: SamplingParams | None, options: dict[str, Any], encoder: PromptEncoder
) -> SamplingParams:
    """The params that a caller gave, whole or as `options`.

    Raises:
        ValueError: both, something else, or what this tokenizer and vocabulary do not allow.
    """
    if params is not None and options:
        raise ValueError(f"[{caller}] both params and options are given: expected one")
    params = SamplingParams(**options) if params is None else params
    is_params = isinstance(params, SamplingParams)
    _require(is_params, caller, "params", params, "SamplingParams or None")
    if params.stop and encoder.tokenizer is None:
        raise ValueError(f"[{caller}] stop strings are given: expected a tokenizer")
    if encoder.vocab_size is not None:
        check_biases(params, encoder.vocab_size)
    return params


def check_samples(n: int) -> None:
    """ValueError unless `n` is a number of samples."""
    _require(is_whole(n, 1), "add_samples", "n", n, ">= 1 (an integer)")


def check_beams(
    params: SamplingParams, num_beams: int, early_stopping: bool, most_beams: int
) -> None:
    """Refuse a beam search that cannot be done.

    Raises:
        ValueError: naming what is wrong.
    """
    if params.temperature > 0 or params.stop or params.sampler is not None:
        raise ValueError(
            "[add_beam_search] temperature, stop or sampler is given: expected none of them, a"
            " beam search takes the likeliest continuations and ends at tokens"
        )
    is_possible = is_count(num_beams, 1) and num_beams <= most_beams
    expected = f"an integer from 1 to {most_beams}"
    _require(is_possible, "add_beam_search", "num_beams", num_beams, expected)
    _require_flag("add_beam_search", "early_stopping", early_stopping)


def _require_flag(caller: str, name: str, value: object) -> None:
    _require(isinstance(value, bool), caller, name, value, "True or False")


def _require(condition: bool, caller: str, name: str, value: object, expected: str) -> None:
    """ValueError unless the condition holds for an argument's value."""
    if not condition:
        raise ValueError(f"[{caller}] {name} is {value!r:.80}: expected {expected}")
