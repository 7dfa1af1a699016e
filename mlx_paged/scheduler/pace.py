"""What guesses of a drafter cost beside the steps that verify them. Knows no mlx."""

from typing import NamedTuple

from mlx_paged.scheduler.cost_model import CostModel
from mlx_paged.scheduler.step import StepWork

REST_RATE, READING_RATE = 0.005, 0.0005
"""The parts by which a pace falls in a plan that wants no guess: of passes and guesses, and of
tokens to read, of which a trial may need many. So a drafter that seemed too slow is tried again:
after some hundred plans if it took twice the time that it is worth."""


class Pace(NamedTuple):
    """Seconds that a drafter takes.

    Attributes:
        of_pass: for each depth, however many requests have a guess.
        of_guess: more for each guess.
        of_token: for each token that it reads before it guesses.
    """

    of_pass: float = 0.0
    of_guess: float = 0.0
    of_token: float = 0.0


class PaceMeter:
    """Predicts the pace of a drafter from the times of its proposals."""

    def __init__(self) -> None:
        self._cost = CostModel()  # of a pass: guesses are its decodes, tokens read its chunk
        self._trust = self._trust_of_reading = 1.0

    @property
    def pace(self) -> Pace:
        """What is known so far; all 0 before the first proposal."""
        works = StepWork(), StepWork(decode_rows=1), StepWork(chunk_tokens=1)
        of_pass, *others = map(self._cost.predict, works)
        of_guess, of_token = (seconds - of_pass for seconds in others)
        reading = self._trust_of_reading * of_token
        return Pace(self._trust * of_pass, self._trust * of_guess, reading)

    def observe(self, passes: int, guesses: int, tokens: int, seconds: float) -> None:
        """Learn from the time of a proposal: so many passes, which made so many guesses after so
        many tokens had been read."""
        if passes and seconds > 0:
            # Each feature is linear, so that the mean pass takes the mean time.
            work = StepWork(decode_rows=guesses / passes, chunk_tokens=tokens / passes)  # type: ignore[arg-type]
            self._cost.observe(work, seconds / passes)
            self._trust = self._trust_of_reading = 1.0

    def rested(self) -> None:
        """No guess was wanted in a plan."""
        self._trust *= 1 - REST_RATE
        self._trust_of_reading *= 1 - READING_RATE
