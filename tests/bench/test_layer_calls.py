"""How many Python calls a decode makes, where ops choose as on a GPU: of a layer, beside the
layers, and for each further row. Counted, never timed."""

import gc
import sys
from typing import Any

import mlx.core as mx
import pytest

from bench.host_cost.gpu_steps import BASE, Course, HostClock, courses_of
from bench.models import random_llama
from bench.names import SIZES

MORE = {"engine": 2, "engine, kv_bits 8": 2, "engine, kv_bits 4": 2, "drop-in": 7}
"""Calls of Python functions that a layer makes beyond those of mlx-lm's."""

BESIDE = {"engine": 130, "engine, compiled": 114}
"""The most calls that a step of one row makes beside those of its layers; mlx-lm makes 20."""

OF_A_ROW = 8
"""The most calls that a further row adds to a step."""


def calls_of(course: Course) -> int:
    """Calls of Python functions in a step."""
    made = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal made
        made += event == "call"

    with course.inside():
        for _ in range(3):
            course.step()
        gc.disable()  # its callbacks would count
        sys.setprofile(note)
        course.step()
        sys.setprofile(None)
        gc.enable()
    return made


def calls_by_course(layers: int, rows: int = 1) -> dict[str, int]:
    """By course the calls of a step."""
    size = {"hidden_size": 64, "num_hidden_layers": layers}
    model = random_llama(SIZES["tiny"] | size)
    model.set_dtype(mx.float16)
    courses = courses_of(model, rows, 40, HostClock())
    return {name: calls_of(courses[name]) for name in (BASE, *MORE, *BESIDE)}


@pytest.fixture(scope="module")
def of_two_layers() -> dict[str, int]:
    return calls_by_course(layers=2)


@pytest.fixture(scope="module")
def of_a_layer(of_two_layers) -> dict[str, int]:
    """By course the calls of a layer."""
    of_four = calls_by_course(layers=4)
    return {name: (of_four[name] - few) // 2 for name, few in of_two_layers.items()}


@pytest.mark.parametrize("course", MORE)
def test_a_layer_makes_few_calls_more_than_mlx_lms(course, of_a_layer):
    assert of_a_layer[course] <= of_a_layer[BASE] + MORE[course]


@pytest.mark.parametrize("course", BESIDE)
def test_a_step_makes_few_calls_beside_its_layers(course, of_two_layers, of_a_layer):
    assert of_two_layers[course] - 2 * of_a_layer[course] <= BESIDE[course]


def test_a_further_row_makes_few_calls(of_two_layers):
    of_nine = calls_by_course(layers=2, rows=9)
    for course in BESIDE:
        assert of_nine[course] - of_two_layers[course] <= 8 * OF_A_ROW
