"""What a decode step costs the host under each policy that the server may have, in turns."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from bench.command import table
from bench.host_cost.gpu_steps import HostClock
from bench.host_cost.silent_engine import VOCAB, decoding_engine, silenced, smallest_llama
from bench.pairs import in_turns, ratio
from mlx_paged.options import Policy

POLICIES = Policy.FCFS, Policy.FAIR
CONTEXT = 256
CLIENTS = 8
QUEUES = {"none waits": 0, "as many wait": 1}
"""Requests that wait for each one that runs."""

Ratios = dict[str, dict[str, float]]
"""By who waits: microseconds of a step by policy, and the ratios of the pairs."""


def policy_costs(rows: int, rounds: int, num_steps: int) -> Ratios:
    """Steps of `rows` requests of several clients, under one policy and the other in turns, step by
    step. A pair is the medians of `num_steps` steps of each; what counts is the processor time of
    the thread that makes the step."""
    model, found = smallest_llama(), Ratios()
    for name, queue in QUEUES.items():
        options: dict[str, Any] = {"clients": CLIENTS, "waiting": queue * rows, "lookahead": True}
        engines = [
            decoding_engine(model, VOCAB, rows, CONTEXT, policy=policy, **options)
            for policy in POLICIES
        ]
        clock = HostClock()
        with ExitStack() as stack:
            stack.enter_context(clock.watching())
            for engine in engines:
                stack.enter_context(silenced(engine, rows, VOCAB))
            courses = {
                str(policy): partial(clock.seconds, engine.step)
                for policy, engine in zip(POLICIES, engines, strict=True)
            }
            seconds = in_turns(courses, rounds * num_steps, warm_up=num_steps, title=name)
        medians = [
            1e6 * np.median(np.reshape(seconds[str(policy)], (rounds, num_steps)), axis=1)
            for policy in POLICIES
        ]
        under, over = (each.tolist() for each in medians)
        least = {str(p): round(min(us), 1) for p, us in zip(POLICIES, (under, over), strict=True)}
        found[name] = least | ratio(over, under)._asdict()
    return found


def policy_table(found: Ratios) -> str:
    heads = next(iter(found.values()))
    rows = [["us a step", *heads]]
    rows += [[name, *(f"{value:.4g}" for value in each.values())] for name, each in found.items()]
    return table(rows)
