"""What is asked of an engine, and when. Knows no engine."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace.

    Attributes:
        arrival_s: when it is due, in seconds after the start of the run.
        prompt: token ids.
        max_tokens: output tokens of each sample; every one of them is generated.
        samples: completions of the prompt, each a stream of its own.
    """

    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int = 1

    @property
    def output_tokens(self) -> int:
        return self.samples * self.max_tokens

    @property
    def kv_tokens(self) -> int:
        """K/V slots of one sample at its end; the last token's own K/V is never needed."""
        return len(self.prompt) + self.max_tokens - 1


Trace = tuple[Job, ...]
"""Jobs in the order of their arrival."""


def make_trace(jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Trace:
    """The jobs, one at each of these times, which ascend."""
    return tuple(
        replace(job, arrival_s=float(time)) for job, time in zip(jobs, arrivals_s, strict=True)
    )


def digest(trace: Trace) -> str:
    """Equal for equal traces."""
    text = json.dumps([[j.arrival_s, j.prompt, j.max_tokens, j.samples] for j in trace])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
