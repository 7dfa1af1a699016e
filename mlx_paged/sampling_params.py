"""How the tokens of a request are to be chosen. Knows no mlx."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Args:
        max_tokens: tokens to generate at most (>= 1).
        temperature: 0 takes the most likely token; above 0 samples from ``p ** (1 / temperature)``.
        top_p: nucleus mass in (0, 1]; 0 or 1 keeps everything (0 as in mlx-lm).
        top_k: how many of the most likely tokens are kept; 0 keeps everything.
        min_p: tokens below ``min_p`` times the largest probability are dropped; 0 keeps everything.
        seed: the request's own random stream. None takes one from the engine's. A seeded request
            draws the same numbers whoever shares its batch.
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
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            self,
            "max_tokens",
            "an integer >= 1",
        )
        _require(0 <= self.temperature < float("inf"), self, "temperature", ">= 0 and finite")
        _require(0 <= self.top_p <= 1, self, "top_p", "from 0 to 1")
        _require(_is_int(self.top_k) and self.top_k >= 0, self, "top_k", "an integer >= 0")
        _require(0 <= self.min_p <= 1, self, "min_p", "from 0 to 1")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**64),
            self,
            "seed",
            "an integer in [0, 2**64)",
        )
        _require(
            all(isinstance(s, str) and s for s in self.stop), self, "stop", "non-empty strings"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, params: SamplingParams, name: str, expected: str) -> None:
    if not condition:
        raise ValueError(
            f"[SamplingParams] {name} is {getattr(params, name)!r}: expected {expected}"
        )
