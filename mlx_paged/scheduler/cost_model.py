"""Predicts how long a step takes from the times of earlier steps. Knows no mlx."""

import math
from bisect import bisect_right
from collections import deque
from operator import add, le, mul
from statistics import median

from mlx_paged.scheduler.step import StepWork

FORGETTING = 0.98  # weight of an observation relative to the next one: about 50 of a kind count
SWEEPS = 4  # sweeps of coordinate descent per observation, each from the previous coefficients

TOKENS_GROWTH = 2
"""The largest ratio of a chunk's tokens to the tokens of the largest chunk so far. Also the largest
ratio of the rows of decodes with drafts to the most rows so far."""

CONTEXT_GROWTH = 8  # the same ratio for a chunk's context, which grows faster than its tokens
WARM_UP = 8  # observations of a kind before any of that kind counts as an outlier
NOVELTY = 1.25  # work of more than this multiple of the largest work so far is never an outlier

# The difference of an observation from its prediction is log(seconds / predicted).
CLIP = 4.0  # outliers differ by more than so many times the usual difference
MARGIN = 2.5  # a bound leaves room for so many usual differences
LARGEST_MARGIN = 1.3  # upper limit of the margin, for a machine whose times vary a lot
USUAL_RATE = 0.05  # rate per observation at which the usual difference follows the latest ones
MIN_USUAL = 0.01  # lower limit of the usual difference
DRIFT_RATE = 0.05  # rate per observation at which the drift follows the differences
CHANGE = 0.2  # the drift follows smaller differences; larger ones may mean a change of speed

CHANGE_STEPS = 10
"""The speed changed if nine of the latest ten differences are large and have the same sign. A pause
or a compilation makes fewer steps slow. One usual difference among the ten does not hide a change.
"""


def features_of(work: StepWork) -> list[float]:
    """The inputs of the linear function that predicts seconds. Chunks come first: `_descend` counts
    time as theirs where steps do not tell whose it is."""
    chunks = (work.chunk_tokens, work.chunk_context)
    return [*chunks, 1.0, work.decode_rows, work.decode_context]


NUM_FEATURES = len(features_of(StepWork()))


class NormalEquations:
    """Least squares of ``row @ coefficients = 1`` over the latest rows. Each row has `FORGETTING`
    times the weight of the next one."""

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
    """Seconds of a step as a linear function of its work, with coefficients >= 0.

    The coefficients minimise the relative errors of the latest steps: a row of the equations is a
    step's features divided by its seconds. Steps with and without chunks have separate equations,
    so that many decodes do not make the model forget the cost of chunks. An outlier is clipped to
    the edge of the usual differences. A change of the machine's speed usually affects all work.
    `drift` follows a small change until the coefficients have adapted; `slowness` follows a large
    change once the last `CHANGE_STEPS` steps agree on it. Memory and the time of a call are
    constant.
    """

    def __init__(self) -> None:
        self.coefficients = [0.0] * NUM_FEATURES  # seconds per unit of feature, divided by slowness
        self.slowness = 1.0  # the equations hold seconds divided by the slowness then
        self.drift = 1.0  # latest seconds relative to the coefficients' prediction
        self._decodes = NormalEquations()  # steps without chunks
        self._chunks = NormalEquations()  # steps with chunks
        self._largest = [0.0] * NUM_FEATURES  # largest value of each feature so far
        self.most_rows = 0  # of decodes in a step so far
        self._usual = 10 * MIN_USUAL  # running mean of abs(difference)
        self._differences: deque[float] = deque(maxlen=CHANGE_STEPS)  # the latest, without drift

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from the time of a step, a finite number > 0."""
        assert 0 < seconds < math.inf, f"seconds is {seconds}"
        features = features_of(work)
        equations = self._chunks if work.chunk_tokens else self._decodes
        known = [NOVELTY * largest for largest in self._largest]
        if equations.num_rows >= WARM_UP and all(map(le, features, known)):
            seconds = self._without_outlier(work, seconds)
        scale = self.slowness / seconds
        equations.add([feature * scale for feature in features])
        self._largest = list(map(max, self._largest, features))
        self.most_rows = max(self.most_rows, work.decode_rows)
        self._descend()

    def predict(self, work: StepWork) -> float:
        """Seconds that a step will take; 0 before the first observation."""
        seconds: float = sum(map(mul, self.coefficients, features_of(work)))
        return self.slowness * self.drift * seconds

    @property
    def margin(self) -> float:
        """Factor from predicted seconds, which are typical, to seconds that few steps exceed."""
        return min(math.exp(MARGIN * self._usual), LARGEST_MARGIN)

    def chunk_within(
        self, bound_seconds: float, work: StepWork, start: int, wanted: int, minimum: int
    ) -> int:
        """The largest number of tokens of a prompt, from `minimum`, so that it advances, to
        `wanted`, that a step can compute beside `work` from position `start`, within
        `bound_seconds` of predicted time and margin. Above the minimum, `TOKENS_GROWTH` and
        `CONTEXT_GROWTH` limit how fast chunks grow: small ones may not show what large ones
        cost."""
        largest_tokens, largest_context, *_ = self._largest

        def is_too_much(num_tokens: int) -> bool:
            total = work + StepWork.chunk(start, num_tokens)
            return (
                total.chunk_tokens > TOKENS_GROWTH * largest_tokens
                or total.chunk_context > CONTEXT_GROWTH * largest_context
                or self.predict(total) * self.margin > bound_seconds
            )

        minimum = min(minimum, wanted)
        return minimum + bisect_right(range(minimum + 1, wanted + 1), False, key=is_too_much)

    def _without_outlier(self, work: StepWork, seconds: float) -> float:
        """The seconds, clipped to the usual difference from the prediction."""
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
        self._usual += USUAL_RATE * (max(abs(clipped), MIN_USUAL) - self._usual)
        self.drift *= math.exp(DRIFT_RATE * clipped)
        return predicted * math.exp(clipped)

    def _is_change_of_speed(self) -> bool:
        if len(self._differences) < CHANGE_STEPS:
            return False
        _, low, *_, high, _ = sorted(self._differences)
        return low > CHANGE or high < -CHANGE

    def _descend(self) -> None:
        """Lower the sum of squares: set one coefficient at a time to its best value >= 0. Those
        that the data do not determine stay. The scale of a feature does not matter."""
        coefficients = self.coefficients
        decodes, chunks = self._decodes, self._chunks
        matrix = [list(map(add, a, b)) for a, b in zip(decodes.matrix, chunks.matrix, strict=True)]
        target = list(map(add, decodes.target, chunks.target))
        for _ in range(SWEEPS):
            for i, line in enumerate(matrix):
                if line[i] > 0:
                    gradient = sum(map(mul, line, coefficients)) - target[i]
                    coefficients[i] = max(0.0, coefficients[i] - gradient / line[i])
