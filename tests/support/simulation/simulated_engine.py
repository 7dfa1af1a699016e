"""A random life of an engine, checked token by token against requests that run alone."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from mlx_paged.engine.core import EngineCore
from mlx_paged.options import Policy
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler import turns
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span, Step
from tests.support.simulation.fault_injection import FaultyRunner
from tests.support.simulation.planned_runner import PlannedRunner
from tests.support.simulation.random_calls import FIRST_KEY, RandomCalls, Setting, keys_of
from tests.support.simulation.solo_checks import SoloChecks, Ticket
from tests.support.simulation.solo_runs import BeamOptions, SoloModel

STEPS_A_TOKEN = 20
"""A request that took more steps a token, preemptions and failures included, would never end."""


def is_forced(span: Span) -> bool:
    """Whether it computes tokens that a grammar forces, which go before prompts as decodes do."""
    return span.request.constraint is not None and span.start >= span.request.num_prompt


class TurnWatch:
    """Counts how long the oldest running prompt waits while others are computed.

    Attributes:
        patience: in so many steps at most; drawn, as is what it gets beside others.
        most_waited: steps in a row in which it got nothing and another prompt did.
        num_overtakes: such steps.
    """

    def __init__(self, rng: random.Random) -> None:
        self.patience = rng.choice((0, 1, 3, turns.PATIENCE))
        self.share = rng.choice((0, 1, turns.SHARE))
        self.most_waited = self.num_overtakes = self._waited = 0
        self._first: int | None = None
        self._planning = Planning()  # of the latest step

    @contextmanager
    def limits(self) -> Iterator[None]:
        """While this is entered, schedulers keep the limits that were drawn."""
        whole = Planning.step

        def step(planning: Planning, *args: Any, **options: Any) -> Step:
            self._planning = planning
            return whole(planning, *args, **options)

        with (
            patch.multiple(turns, PATIENCE=self.patience, SHARE=self.share),
            patch.object(Planning, "step", step),
        ):
            yield

    def see(self, step: Step) -> None:
        """A step that is launched."""
        planning = self._planning
        prompts = [r for r in planning.prompts[:1] if not (r.num_preempted or r.is_background)]
        first = prompts[0] if prompts else None
        prompts = [span for span in step.spans if len(span) > 1 + len(span.further) + span.stored]
        computed = {span.request.id for span in prompts if not is_forced(span)}
        before, self._first = self._first, first.id if first else None
        is_passed = first is not None and first.id not in planning.requests and bool(computed)
        self.num_overtakes += is_passed
        self._waited = is_passed * (1 + self._waited * (before == self._first))
        self.most_waited = max(self.most_waited, self._waited)


class Simulation:
    """One schedule: random calls of an engine between its steps, and what must hold after each."""

    def __init__(
        self,
        setting: Setting,
        engine: EngineCore,
        runner: FaultyRunner,
        solo: SoloModel,
        rng: random.Random,
        watch: TurnWatch,
        **calls: Any,
    ) -> None:
        self.turns = watch
        runner.on_launch = watch.see
        self.setting = setting
        self.engine = engine
        self.runner = runner
        self.rng = rng
        self.solo = solo
        self.calls = RandomCalls(setting, rng, solo.vocab, **calls)
        self.counts: Counter[str] = Counter(schedules=1)
        self.checks = SoloChecks(solo, runner, self.counts)
        self.tickets: dict[int, Ticket] = {}
        self._num_arrivals = setting.num_arrivals
        self._num_aborts = rng.randint(0, setting.num_arrivals)  # so that they hide no hang
        self._steps_left = 100

    def run(self) -> None:
        """Live through it; AssertionError, or whatever the engine raises, if something is wrong."""
        with self.turns.limits():
            self._live()
        for request_id in self.tickets:
            self.engine.release(request_id)
        self._check_end()

    def _live(self) -> None:
        while self._num_arrivals or self.engine.has_work:
            while self.rng.random() < 0.4:
                self._call()
            self._step()
            self.counts[self.calls.control(self.engine) or "not controlled"] += 1
            self._steps_left -= 1
            assert self._steps_left, "no end in sight"

    def result(self) -> Counter[str]:
        """What happened."""
        scheduler = self.engine.scheduler
        self.counts["steps"] = self.engine.stats.steps
        self.counts["faults"] = self.runner.num_raised
        self.counts["preemptions"] = scheduler.num_preemptions
        self.counts["overtakes"] = self.turns.num_overtakes
        self.counts["cow_clones"] = scheduler.allocator.store.cow_clones
        self.counts["shared_keys"] = self.engine.stats.shared_keys
        self.counts["windowed"] = len(self.setting.groups) > 1
        self.counts["recurrent"] = self.setting.recurrent
        self.counts["compiled"] = getattr(self.runner.inner, "compiled", None) is not None
        if scheduler.decoding.gives_several:
            self.counts["drafts"] = scheduler.decoding.num_drafted
            self.counts["accepted_drafts"] = scheduler.decoding.num_right
        return self.counts

    # What callers do

    def _call(self) -> None:
        adding = {
            "request": self._add_request,
            "fork": self._fork,
            "samples": self._add_samples,
            "beams": self._add_beams,
        }
        others = (self._release, self._reset, *[self._abort] * (self._num_aborts > 0))
        adds = self._num_arrivals > 0 and self.rng.random() < 0.6
        self._num_arrivals -= adds
        with suppress(KeyboardInterrupt):  # a fork waits for the step under way
            (adding[self.rng.choice(self.calls.kinds)] if adds else self.rng.choice(others))()

    def _add_request(self) -> None:
        prompt, salt = self.calls.prompt()
        params, options = self.calls.params(len(prompt)), self._options(salt)
        options |= {"keep": self.rng.random() < 0.4, "turn_ends": self.calls.turn_ends(prompt)}
        self._added(
            prompt, params, salt, lambda: [self.engine.add_request(prompt, params, **options)]
        )

    def _add_samples(self) -> None:
        prompt, salt = self.calls.prompt()
        params, options = self.calls.params(len(prompt)), self._options(salt)
        options["turn_ends"] = self.calls.turn_ends(prompt)
        n = self.rng.randint(1, 5)
        self.counts["samples"] += self._added(
            prompt, params, salt, lambda: self.engine.add_samples(prompt, n, params, **options)
        )

    def _add_beams(self) -> None:
        prompt, salt = self.calls.prompt()
        (params, beams), options = self.calls.beams(), self._options(salt)
        options |= vars(beams)
        self.counts["beams"] += self._added(
            prompt,
            params,
            salt,
            lambda: [self.engine.add_beam_search(prompt, params=params, **options)],
            beams,
        )

    def _options(self, salt: str) -> dict[str, Any]:
        share = self.rng.choice(((), ("a",), ("b",), ("b", "part"), ("c",)))
        priority = self.rng.choice((-1, 0, 1, 1, "background"))
        return {"priority": priority, "cache_salt": salt, "share": share}

    def _fork(self) -> None:
        living = [i for i, t in self.tickets.items() if self.engine.request(i) and t.beams is None]
        if not living:
            return
        ended = [i for i in living if self._is_kept(i)]
        parent_id = self.rng.choice(ended if ended and self.rng.random() < 0.5 else living)
        parent, ticket = self.engine.request(parent_id), self.tickets[parent_id]
        assert parent is not None
        suffix = self.calls.tokens(self.rng.choice((0, 0, 1, 3, 9)))
        params = self.calls.params(len(parent.tokens)) if self.rng.random() < 0.6 else None
        keep = self.rng.random() < 0.4
        try:
            child_id = self.engine.fork(parent_id, suffix, params, keep=keep)
        except ValueError:
            self.counts["refused"] += 1
            if self.engine.request(parent_id) is None:  # the step under way has ended it
                return
            length = len(parent.tokens) + len(suffix)
            fits = self.setting.fits(length, (params or parent.params).max_tokens)
            assert not fits or not (params or self._may_follow(ticket, parent.tokens + suffix))
            return
        child = self.engine.request(child_id)
        assert child is not None
        tokens = list(child.keys)
        assert len(tokens) == len(parent.tokens) + len(suffix), "not all that its parent has"
        assert parent.finish_reason or not parent.num_in_flight, "a token under way is left out"
        self.checks.fork(ticket, tokens, suffix)
        self.counts["forks"] += 1
        self._admit(child_id, tokens, ticket.salt)
        if params is None:
            self.tickets[child_id].begun = [*ticket.begun, *tokens[len(ticket.prompt) :]]

    def _abort(self) -> None:
        self._num_aborts -= 1
        for request_id in self._anyone():
            completion, ticket = self.engine.abort(request_id), self.tickets[request_id]
            if completion is not None:
                assert ticket.completion is None, "it ended before"
                ticket.aborted = True
                self.counts["aborts"] += 1
                self.checks.completion(ticket, completion)

    def _release(self) -> None:
        for request_id in self._anyone():
            self.engine.release(request_id)
            self.counts["releases"] += 1

    def _reset(self) -> None:
        tier, has_tier = self.engine.scheduler.tier, self.engine.scheduler.has_tier
        if self.rng.random() < (0.01 if has_tier else 0.2):  # it gives up the disk
            self.engine.reset_prefix_cache()
        if tier.has_more() and not self.engine.has_work:
            self.engine._pipeline.copy_when_idle()

    def _anyone(self) -> list[int]:
        return [self.rng.choice(list(self.tickets))] if self.tickets else []

    def _is_kept(self, request_id: int) -> bool:
        request = self.engine.request(request_id)
        return request is not None and bool(request.finish_reason)

    def _added(
        self,
        prompt: list[int],
        params: SamplingParams,
        salt: str,
        add: Callable[[], list[int]],
        beams: BeamOptions | None = None,
    ) -> int:
        """How many requests were added: none if they can never fit, and only then."""
        try:
            ids = add()
        except ValueError:
            ids = []
        assert bool(ids) is self.setting.fits(len(prompt), params.max_tokens), f"added {ids}"
        self.counts["refused"] += not ids
        for i, request_id in enumerate(ids):
            self._admit(request_id, prompt, salt, beams)
            seed = None if params.seed is None else (params.seed + i) % 2**64
            assert seed in (None, self.tickets[request_id].seed), "a seed is not the one given"
        return len(ids)

    def _admit(
        self, request_id: int, prompt: list[int], salt: str, beams: BeamOptions | None = None
    ) -> None:
        request = self.engine.request(request_id)
        assert request is not None
        prompt = keys_of(prompt)
        ticket = Ticket(prompt, request.params, request.seed, salt, beams)
        lengths = [processor.length for processor in ticket.params.logits_processors]
        length = self.calls.breaking_length(len(prompt), ticket.params.max_tokens)
        if length is not None and beams is None and request.params.constraint is None:
            self.runner.bad[request_id] = length
            lengths.append(length)
        ticket.breaks_at = min(lengths, default=None)
        self.counts["constrained"] += ticket.params.constraint is not None
        self.counts["pictures"] += max(prompt) >= FIRST_KEY
        self.tickets[request_id] = ticket
        self.counts["requests"] += 1
        width = beams.num_beams if beams else 1
        self._steps_left += STEPS_A_TOKEN * width * (len(prompt) + ticket.params.max_tokens)

    def _may_follow(self, parent: Ticket, tokens: list[int]) -> bool:
        """Whether the grammar of a request allows these tokens, its prompt included."""
        own = [*parent.begun, *tokens[len(parent.prompt) :]]
        return self.solo.allows(parent.params, own)

    # What must hold

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
        self.engine.scheduler.allocator.check_integrity()
        # Under turns of clients a prompt may be overtaken in two steps, whatever the patience.
        least = 2 if self.setting.policy is Policy.FAIR else 0
        assert self.turns.most_waited <= max(self.turns.patience, least), "a long prompt starves"
        violations = getattr(getattr(self.runner.inner, "pool", None), "violations", [])
        self.counts["violations"] += len(violations)
        assert not violations, violations[0]
        ids = [output.request_id for output in outputs if output.token is not None]
        several = self.calls.constraints or self.engine.scheduler.decoding.gives_several
        assert several or len(set(ids)) == len(ids), "two tokens of one request in a step"
        for output in outputs:
            ticket = self.tickets[output.request_id]
            self.checks.output(ticket, output)
            if ticket.completion is not None and ticket.completion.error is not None:
                assert not self._is_kept(output.request_id), "kept in spite of an error"
            if output.completion is not None:
                is_hit = self.setting.recurrent and output.completion.cached_prompt_tokens > 0
                self.counts["restored"] += is_hit
                history = (ticket.salt, ticket.prompt + output.completion.tokens)
                self.calls.histories.append(history)

    def _check_end(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        self.counts["leaked_blocks"] += scheduler.allocator.store.blocks_in_use
        unended = [i for i, ticket in self.tickets.items() if ticket.completion is None]
        assert not unended, f"requests {unended} never ended"
        for ticket in self.tickets.values():
            if ticket.completion is not None and ticket.beams is None:
                text = [*ticket.begun, *ticket.completion.tokens]
                self.counts["valid"] += self.solo.check(ticket.params, text)
        waiting = [request.id for request in scheduler.waiting]
        waiting += scheduler.tier.loading
        assert not waiting, f"{waiting} still wait"
        for left in (scheduler.running, scheduler.parked, scheduler._isolated):
            assert not left, f"the scheduler still has {list(left)}"
        for left in (engine._requests, engine._kept, engine._beams, engine._outputs._texts):
            assert not left, f"the engine still has {list(left)}"
        if isinstance(self.runner.inner, PlannedRunner):
            assert not self.runner.inner.leaks(), "another rank still has requests"
            self.counts["plans"] = self.runner.inner.num_plans
        references = scheduler.allocator.store.refcount_histogram()
        assert references == {0: self.setting.num_blocks}, f"blocks by references: {references}"
        states = getattr(self.runner.inner, "states", {})
        snapshots = getattr(scheduler.allocator.states, "snapshots", None)
        kept = set() if snapshots is None else set(snapshots.state_ids())
        held = set(getattr(states, "_held", states))
        assert held == kept, f"states {held}, but those of the prefix cache are {kept}"
