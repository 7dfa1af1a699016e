"""Whether requests ended as they would have alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_paged.engine.pipeline import MAX_FAULTS
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason
from mlx_paged.sampling_params import SamplingParams
from tests.support.simulation.fault_injection import FaultyRunner
from tests.support.simulation.solo_runs import (
    BeamOptions,
    Solo,
    SoloModel,
    beam_score,
    plain_beam_search,
    solo_run,
)


@dataclass(eq=False)
class Ticket:
    """A request as its caller sees it.

    Attributes:
        breaks_at: its tokens, prompt included, at which something wrong with it shows.
        begun: the last tokens of its prompt, which its grammar has followed already.
        seen: tokens that came out step by step.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    salt: str
    beams: BeamOptions | None = None
    breaks_at: int | None = None
    begun: list[int] = field(default_factory=list)
    aborted: bool = False
    seen: list[int] = field(default_factory=list)
    completion: Completion | None = None
    solo: Solo | None = None

    @property
    def breaks_after(self) -> float:
        """How many tokens it yields before something goes wrong."""
        if self.breaks_at is None:
            return float("inf")
        return max(0, self.breaks_at - len(self.prompt))


class SoloChecks:
    """Compares requests with their runs alone; raises AssertionError where they differ.

    Args:
        runner: knows whom its failures may be blamed on.
        counts: what to count in.
    """

    def __init__(self, model: SoloModel, runner: FaultyRunner, counts: Counter[str]) -> None:
        self._model = model
        self._runner = runner
        self._counts = counts

    def solo(self, ticket: Ticket) -> Solo:
        """The request's run alone."""
        if ticket.solo is None:
            salt = ticket.salt.encode()
            args = ticket.prompt, ticket.params, ticket.seed, salt, ticket.begun
            ticket.solo = solo_run(self._model, *args)
        return ticket.solo

    def output(self, ticket: Ticket, output: TokenOutput) -> None:
        """A token, or the end, that a step gave."""
        assert ticket.completion is None or ticket.aborted, "an output after the last"
        if output.token is not None:
            ticket.seen.append(output.token)
        if output.completion is not None:
            assert output.completion.finish_reason is not FinishReason.ABORT
            self.completion(ticket, output.completion)
            assert ticket.beams or ticket.seen == output.completion.tokens, "outputs are missing"

    def completion(self, ticket: Ticket, completion: Completion) -> None:
        """The end of a request."""
        ticket.completion = completion
        self._counts["tokens"] += len(completion.tokens)
        self._counts["cached_tokens"] += completion.cached_prompt_tokens
        self._counts["errors"] += completion.finish_reason is FinishReason.ERROR
        assert completion.prompt_tokens == len(ticket.prompt)
        assert len(completion.logprobs) == len(completion.tokens)
        if ticket.beams is None:
            self._tokens(ticket, completion)
        else:
            self._beams(ticket, ticket.beams, completion)

    def fork(self, ticket: Ticket, tokens: list[int], suffix: list[int]) -> None:
        """The prompt `tokens` of a fork of a request."""
        stem = tokens[: len(tokens) - len(suffix)]
        expected = (ticket.prompt + self.solo(ticket).tokens)[: len(stem)]
        is_right = stem == expected or self._is_near_tie(ticket, stem[len(ticket.prompt) :])
        assert is_right and tokens == stem + suffix, f"fork has {tokens}, expected {expected}"

    def _tokens(self, ticket: Ticket, completion: Completion) -> None:
        tokens, _, reason = self.solo(ticket)
        if ticket.breaks_after < len(tokens):
            tokens, reason = tokens[: int(ticket.breaks_after)], FinishReason.ERROR
        ended = completion.finish_reason
        if ticket.aborted or (ended is FinishReason.ERROR and self._is_blamed(completion)):
            tokens, reason = tokens[: len(completion.tokens)], ended
        if self._is_near_tie(ticket, completion.tokens):
            self._counts["near_ties"] += 1
        elif (completion.tokens, ended) != (tokens, reason):
            self._counts["mismatches"] += 1
            raise AssertionError(f"{completion}, expected {tokens} and {reason}")

    def _beams(self, ticket: Ticket, options: BeamOptions, completion: Completion) -> None:
        if completion.finish_reason is FinishReason.ERROR:
            assert self._runner.rate and self._runner.beams_failed, f"{completion}: no reason"
        if ticket.aborted or completion.finish_reason is FinishReason.ERROR:
            return
        logprobs = self._model.logprobs(ticket.salt.encode())
        expected = plain_beam_search(logprobs, ticket.prompt, ticket.params, options)
        found = [beam.tokens for beam in completion.beams]
        if found == expected:
            return
        # Of two hypotheses about equally good an engine may keep the other one, and end elsewhere.
        limit = self._model.near_tie
        near = plain_beam_search(logprobs, ticket.prompt, ticket.params, options, found, limit)
        scores, best, others = (
            [beam_score(logprobs, ticket.prompt, tokens, options) for tokens in beams]
            for beams in (found, expected, near)
        )
        if any(np.allclose(scores, each, rtol=0, atol=limit) for each in (best, others)):
            self._counts["near_ties"] += 1
        else:
            self._counts["mismatches"] += 1
            raise AssertionError(f"{completion}, expected {expected}")

    def _is_blamed(self, completion: Completion) -> bool:
        """Whether steps failed for no reason, with this request alone or once too often."""
        runner, request_id = self._runner, completion.request_id
        too_often = runner.took_part[request_id] >= MAX_FAULTS
        return runner.rate > 0 and (too_often or request_id in runner.alone)

    def _is_near_tie(self, ticket: Ticket, tokens: Sequence[int]) -> bool:
        """Whether `tokens` leave those of the run alone where two were about equally good."""
        solo = self.solo(ticket)
        triples = zip(tokens, solo.tokens, solo.margins, strict=False)
        limit = self._model.near_tie
        return next((margin for a, b, margin in triples if a != b), limit) < limit
