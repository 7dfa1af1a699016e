"""How many Python calls a layer of a decode makes, where ops choose as on a GPU: counted."""

import gc
import sys
from typing import Any

import mlx.core as mx
import pytest

from bench.host_cost.gpu_steps import BASE, Course, HostClock, courses_of
from bench.models import random_llama
from bench.names import SIZES

MORE = {"engine": 2, "engine, kv_bits 8": 2, "engine, kv_bits 4": 2, "drop-in": 9}
"""Calls of Python functions that a layer makes beyond those of mlx-lm's."""


def calls_of(course: Course) -> int:
    """Calls of Python functions in a step."""
    made = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal made
        made += event == "call"

    with course._inside():
        for _ in range(3):
            course.step()
        gc.disable()  # its callbacks would count
        sys.setprofile(note)
        course.step()
        sys.setprofile(None)
        gc.enable()
    return made


@pytest.fixture(scope="module")
def of_a_layer() -> dict[str, int]:
    """By course the calls of a layer."""
    found: list[dict[str, int]] = []
    for layers in (2, 4):
        size = {"hidden_size": 64, "num_hidden_layers": layers}
        model = random_llama(SIZES["tiny"] | size)
        model.set_dtype(mx.float16)
        courses = courses_of(model, 1, 40, HostClock())
        found.append({name: calls_of(courses[name]) for name in (BASE, *MORE)})
    few, many = found
    return {name: (many[name] - few[name]) // 2 for name in few}


@pytest.mark.parametrize("course", MORE)
def test_a_layer_makes_few_calls_more_than_mlx_lms(course, of_a_layer):
    assert of_a_layer[course] <= of_a_layer[BASE] + MORE[course]
