"""Writes each result as JSON lines as soon as it is there; finds those that an earlier run left."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.generate.batch_job import PREFIX, BatchJob
from mlx_paged.generate.jobs import Job
from mlx_paged.outputs import Beam, Completion
from mlx_paged.request import FinishReason


@dataclass(frozen=True, slots=True)
class Result:
    """A finished prompt."""

    job: Job
    completions: list[Completion]

    @classmethod
    def refused(cls, job: Job, reason: str) -> "Result":
        """The result of a prompt that the engine refused."""
        completion = Completion(
            request_id=-1,
            prompt_tokens=len(job.tokens),
            tokens=[],
            text="",
            logprobs=[],
            finish_reason=FinishReason.ERROR,
            ttft_s=None,
            seconds=0.0,
            cached_prompt_tokens=0,
            preemptions=0,
            error=reason,
        )
        return cls(job, [completion])

    @property
    def errors(self) -> list[str]:
        """Why it failed, in one line each."""
        if isinstance(self.job, BatchJob):
            return [] if self.job.error is None else [" ".join(str(self.job.error).split())]
        failed = (c for c in self.completions if c.finish_reason is FinishReason.ERROR)
        return [str(completion.error) for completion in failed]

    @property
    def answers(self) -> Sequence[Completion | Beam]:
        """The beams of a beam search, else the completions."""
        return self.completions[0].beams or self.completions


def read_answers(path: str, jobs: Sequence[Job]) -> dict[int, list[bytes]]:
    """The lines of the prompts that an earlier run has finished without an error, by the number of
    the prompt. A last line that was cut off does not count. Raises ValueError if a line is not the
    result of one of these jobs, OSError if the file cannot be read."""
    lines: defaultdict[int, list[bytes]] = defaultdict(list)
    failed = set()
    digests = {job.number: job.digest for job in jobs}
    with Path(path).open("rb") as file:
        for place, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                number, digest, has_failed = _identity(json.loads(line))
                is_same = digests.get(number) == digest or (has_failed and number in digests)
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path} line {place}: expected a line of --output") from None
            if not is_same:
                raise ValueError(
                    f"{path} line {place}: prompt {number} or its options changed since this"
                    f" line was written: expected the prompts and options of that run"
                )
            lines[number].append(line)
            if has_failed:
                failed.add(number)
    expected = {job.number: job.num_answers for job in jobs}
    return {
        number: found
        for number, found in lines.items()
        if number not in failed and len(found) == expected[number]
    }


def _identity(record: Any) -> tuple[int, str, bool]:
    """The number and the digest of the job of a line of --output, and whether it failed. Raises
    TypeError, KeyError or ValueError for another line."""
    if "custom_id" not in record:
        return record["number"], record["digest"], "error" in record
    number, _, digest = record["id"].removeprefix(PREFIX).partition("_")
    return int(number), digest, record["error"] is not None


@contextmanager
def results_file(
    path: str | None, answered: Mapping[int, Sequence[bytes]]
) -> Iterator[Callable[[Result], None]]:
    """Replace the file by the lines of the prompts that are answered. Yields what appends a result;
    without a path it does nothing. At the end the lines are put into the order of the input. Raises
    OSError, which names the file."""
    if path is None:
        yield lambda _: None
        return
    written = {number: b"".join(lines) for number, lines in answered.items()}
    if written:
        _replace(path, written)
    with open(path, "ab" if written else "wb", buffering=0) as file:

        def write(result: Result) -> None:
            texts = (json.dumps(record, ensure_ascii=False) + "\n" for record in _records(result))
            data = written[result.job.number] = "".join(texts).encode()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error

        yield write
    is_ordered = list(written) == sorted(written)
    if not is_ordered and Path(path).is_file() and not path.startswith("/dev/"):
        _replace(path, written)


def _replace(path: str, lines: Mapping[int, bytes]) -> None:
    """Write the file anew, by number. A kill leaves the old file or the new one."""
    target = os.path.realpath(path)
    part = Path(f"{target}.part")
    part.write_bytes(b"".join(lines[number] for number in sorted(lines)))
    part.replace(target)


def _records(result: Result) -> Iterator[dict[str, Any]]:
    """A line for each answer."""
    job, first = result.job, result.completions[0]
    if isinstance(job, BatchJob):
        yield job.record
        return
    for index, answer in enumerate(result.answers):
        completion = answer if isinstance(answer, Completion) else first
        record: dict[str, Any] = {"number": job.number, "digest": job.digest}
        if job.spec.id is not None:
            record["id"] = job.spec.id
        if job.spec.messages is None:
            record["prompt"] = job.spec.prompt
        else:
            record["messages"] = job.spec.messages
        record |= {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "generation_tokens": len(answer.tokens),
            "tokens": answer.tokens,
        }
        if not job.args.no_logprobs:
            record["logprobs"] = answer.logprobs
        if isinstance(answer, Beam):
            record["score"] = answer.score
        record |= job.told_max_tokens
        names = "prompt_tokens", "cached_prompt_tokens", "prefix_miss", "ttft_s", "seconds"
        record |= {name: getattr(completion, name) for name in names}
        if completion.top_logprobs:
            record["top_logprobs"] = completion.top_logprobs
        if completion.error is not None:
            record["error"] = completion.error
        if len(result.answers) > 1:
            record["index"] = index
        yield record
