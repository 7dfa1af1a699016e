"""How long a step takes, learned from the steps before it. Knows no mlx."""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from operator import add, mul
from statistics import median

FORGETTING = 0.98
"""Weight of an observation relative to the next one: about the last 50 of each kind count."""

SWEEPS = 4
"""Of coordinate descent per observation; each goes on where the last one ended."""

TOKENS_GROWTH = 2
"""A chunk is at most so many times as long as any before, whatever it is predicted to cost."""

CONTEXT_GROWTH = 8
"""The same for its context, which grows faster where chunks double as a prompt goes on."""

WARM_UP = 8
"""Observations of each kind before one can be an outlier."""

NOVELTY = 1.25
"""Work more than so many times as large as any before is never an outlier: nobody knows it yet."""

# An observation's difference from its prediction is log(seconds / predicted).

CLIP = 4.0
"""Outliers differ by more than so many times what is usual."""

MARGIN = 2.5
"""How many usual differences from the prediction a bound leaves room for."""

LARGEST_MARGIN = 1.3
"""On a machine so unsteady that no room is enough."""

USUAL_RATE = 0.05
"""How fast the usual difference follows the latest ones, per observation."""

LEAST_USUAL = 0.01
"""The usual difference is taken to be no less, however steady the machine was."""

DRIFT_RATE = 0.05
"""How fast the drift follows the differences, per observation."""

CHANGE = 0.2
"""Differences below are left to the drift; larger ones may mean a change of speed."""

CHANGE_STEPS = 10
"""They do when all but one of so many are large and alike: neither a pause nor a few compilations
last as long, nor does one of them hide the change."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Attributes:
        decode_rows: requests that compute one token.
        decode_context: tokens of context that these rows read, in all.
        chunk_tokens: prompt tokens.
        chunk_context: tokens of context that these attend, in all: position p attends p + 1.
    """

    decode_rows: int = 0
    decode_context: int = 0
    chunk_tokens: int = 0
    chunk_context: int = 0

    @classmethod
    def chunk(cls, start: int, num_tokens: int) -> "StepWork":
        """A chunk of `num_tokens` of a prompt, from position `start`."""
        return cls(0, 0, num_tokens, num_tokens * start + num_tokens * (num_tokens + 1) // 2)

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.decode_rows + other.decode_rows,
            self.decode_context + other.decode_context,
            self.chunk_tokens + other.chunk_tokens,
            self.chunk_context + other.chunk_context,
        )

    @property
    def features(self) -> list[float]:
        """What the seconds are a linear function of."""
        rows, tokens = self.decode_rows, self.chunk_tokens
        return [1.0, rows, self.decode_context, tokens, self.chunk_context]


NUM_FEATURES = len(StepWork().features)


class NormalEquations:
    """Least squares of ``row @ coefficients = 1`` over the latest rows: each weighs `FORGETTING`
    times the one after it."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)]  # sum of outer(row, row)
        self.target = [0.0] * NUM_FEATURES  # sum of row
        self.num_rows = 0

    def add(self, row: list[float]) -> None:
        self.matrix = [
            [FORGETTING * old + a * b for old, b in zip(line, row, strict=True)]
            for line, a in zip(self.matrix, row, strict=True)
        ]
        self.target = [FORGETTING * old + a for old, a in zip(self.target, row, strict=True)]
        self.num_rows += 1


class CostModel:
    """Seconds of a step: a linear function of its work, with coefficients >= 0.

    The coefficients minimise the relative errors of the latest steps: a row of the equations is the
    step's features over its seconds. Steps with and without prompt tokens are forgotten separately,
    so that a long time of decoding leaves the cost of chunks known. A step that took unusually long
    or short counts as one at the edge of the usual. Whatever slows the machine down tends to slow
    all of its work: `drift` follows small changes at once, until the coefficients have caught up,
    and `slowness` a large one, when the last `CHANGE_STEPS` agree on it. Memory and the time of a
    call are constant.
    """

    def __init__(self) -> None:
        self.coefficients = [0.0] * NUM_FEATURES  # seconds per unit of each feature, over slowness
        self.slowness = 1.0  # the equations hold each step's seconds over the slowness it met
        self.drift = 1.0  # seconds of late over what the coefficients make of them
        self._decodes = NormalEquations()  # steps without prompt tokens
        self._chunks = NormalEquations()  # steps with some
        self._largest = [0.0] * NUM_FEATURES  # of each feature so far
        self._usual = 10 * LEAST_USUAL  # running mean of abs(difference)
        self._differences: deque[float] = deque(maxlen=CHANGE_STEPS)  # the latest, before drift

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that a step took so long.

        Raises:
            ValueError: seconds is not a finite number > 0.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"[observe] seconds is {seconds}: expected a finite number > 0")
        features = work.features
        equations = self._chunks if work.chunk_tokens else self._decodes
        if equations.num_rows >= WARM_UP and self._is_familiar(features):
            seconds = self._without_outlier(work, seconds)
        scale = self.slowness / seconds
        equations.add([feature * scale for feature in features])
        self._largest = list(map(max, self._largest, features))
        self._descend()

    def predict(self, work: StepWork) -> float:
        """Seconds that a step will take; 0 as long as nothing was observed."""
        seconds: float = sum(map(mul, self.coefficients, work.features))
        return self.slowness * self.drift * seconds

    @property
    def margin(self) -> float:
        """What a prediction is multiplied by to be kept in all but few steps: predictions aim at
        the middle."""
        return min(math.exp(MARGIN * self._usual), LARGEST_MARGIN)

    def chunk_within(
        self, bound_seconds: float, work: StepWork, start: int, wanted: int, minimum: int
    ) -> int:
        """How many tokens of a prompt a step can take beside its other work.

        Beyond the minimum, a step's chunks are at most `TOKENS_GROWTH` times as long as the longest
        so far, and likewise for their context: what large ones cost may not show in smaller ones.

        Args:
            bound_seconds: what the step may take, as predicted.
            work: the step's other work.
            start: position at which the prompt goes on.
            wanted: tokens that there are to compute.
            minimum: tokens to compute whatever they cost, so that the prompt gets on.

        Returns:
            The largest number of tokens within these limits, from ``min(minimum, wanted)`` to
            `wanted`; the bound is kept with a margin for the differences that are usual.
        """
        *_, largest_tokens, largest_context = self._largest

        def is_too_much(num_tokens: int) -> bool:
            total = work + StepWork.chunk(start, num_tokens)
            return (
                total.chunk_tokens > TOKENS_GROWTH * largest_tokens
                or total.chunk_context > CONTEXT_GROWTH * largest_context
                or self.predict(total) * self.margin > bound_seconds
            )

        least = min(minimum, wanted)
        return least + bisect_right(range(least + 1, wanted + 1), False, key=is_too_much)

    def _is_familiar(self, features: list[float]) -> bool:
        pairs = zip(features, self._largest, strict=True)
        return all(feature <= NOVELTY * largest for feature, largest in pairs)

    def _without_outlier(self, work: StepWork, seconds: float) -> float:
        """The seconds to learn from, no further from the prediction than usual."""
        predicted = self.predict(work)
        if predicted == 0:
            return seconds
        self._differences.append(math.log(seconds / predicted * self.drift))
        if self._is_change_of_speed():
            self.slowness *= math.exp(median(self._differences))
            self.drift = 1.0
            self._differences.clear()
            predicted = self.predict(work)
        edge = CLIP * self._usual
        clipped = min(max(math.log(seconds / predicted), -edge), edge)
        self._usual += USUAL_RATE * (max(abs(clipped), LEAST_USUAL) - self._usual)
        self.drift *= math.exp(DRIFT_RATE * clipped)
        return predicted * math.exp(clipped)

    def _is_change_of_speed(self) -> bool:
        if len(self._differences) < CHANGE_STEPS:
            return False
        _, low, *_, high, _ = sorted(self._differences)
        return low > CHANGE or high < -CHANGE

    def _descend(self) -> None:
        """Lower the sum of squares, one coefficient at a time to its best value >= 0.

        What the data leave open stays as it was. The scale of a feature makes no difference.
        """
        coefficients = self.coefficients
        decodes, chunks = self._decodes, self._chunks
        matrix = [list(map(add, a, b)) for a, b in zip(decodes.matrix, chunks.matrix, strict=True)]
        target = list(map(add, decodes.target, chunks.target))
        for _ in range(SWEEPS):
            for i, line in enumerate(matrix):
                if line[i] > 0:
                    gradient = sum(map(mul, line, coefficients)) - target[i]
                    coefficients[i] = max(0.0, coefficients[i] - gradient / line[i])
