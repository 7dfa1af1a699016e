"""A source of constraints that is added without a change of the package."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.generate import generate_step

from mlx_paged import Engine, SamplingParams
from mlx_paged.constraint import Constraint, Row
from tests.support.models import tiny_models

PROMPTS = [[1, 2, 3, 4, 5], [7, 7, 7], [9, 8, 7, 6, 5, 4, 3]]
NUM_TOKENS = 24
VOCAB = tiny_models.VOCAB


class Multiples:
    """Every token is a multiple of the request's number. After a multiple of twice this
    number comes the next multiple, which the request gets at once."""

    asked = 0
    """How often a batch of rows was asked for."""

    def __init__(self, of: int) -> None:
        self.of = of

    def copy(self, tokens: Sequence[int]) -> "Multiples":
        return copy(self)

    def ahead(self, tokens: Sequence[int]) -> list[int]:
        following = after(self.of, tokens[-1])
        return [] if following is None else [following]

    @classmethod
    def masks(
        cls, rows: Sequence[Row[Any]], vocab: int
    ) -> tuple[npt.NDArray[np.uint32], dict[int, Exception]]:
        cls.asked += 1
        allowed = np.zeros((len(rows), vocab), bool)
        for index, row in enumerate(rows):
            following = after(row.constraint.of, row.tokens[row.length - 1])
            own = slice(None, None, row.constraint.of) if following is None else following
            allowed[index, own] = True
        return np.packbits(allowed, axis=1, bitorder="little").view(np.uint32), {}


class Others(Multiples):
    """A second class of constraints, whose rows are asked for apart."""


def after(of: int, token: int) -> int | None:
    """The only token that may follow this one; None: each multiple may."""
    return (token + of) % VOCAB // of * of if token % (2 * of) == 0 else None


class Source:
    """Constraints of requests whose `grammar` is the number."""

    def start(self, params: SamplingParams, position: int) -> Constraint | None:
        if params.grammar is None:
            return None
        return (Others if params.grammar == "5" else Multiples)(int(params.grammar))

    def compile(self, params: SamplingParams) -> None:
        pass

    def knows(self, params: SamplingParams) -> bool:
        return True

    def warm_up(self) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.tiny_model("llama")


def with_source(model: Any, **options: Any) -> Engine:
    engine = Engine(model, num_blocks=100, block_size=4, **options)
    engine.constraints = Source()
    return engine


def masked(model: Any, prompt: Sequence[int], of: int) -> list[int]:
    """The greedy tokens of mlx-lm, whose processor leaves what the constraint allows."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        following = after(of, int(tokens[-1]))
        ids = mx.arange(VOCAB)
        allowed = ids % of == 0 if following is None else ids == following
        return mx.where(allowed, logits, -mx.inf)

    steps = generate_step(
        mx.array(prompt), model, max_tokens=NUM_TOKENS, logits_processors=[process]
    )
    return [token for token, _ in steps]


def test_tokens_are_those_of_a_processor_in_mlx_lm(model):
    """In one batch: two classes of constraints, and rows without one."""
    engine = with_source(model)
    numbers = ["3", "5", None, "4"]
    found = engine.generate(
        [PROMPTS[i % 3] for i in range(12)],
        [SamplingParams(max_tokens=NUM_TOKENS, grammar=numbers[i % 4]) for i in range(12)],
    )
    for i, completion in enumerate(found):
        of = int(numbers[i % 4] or 1)
        expected = masked(model, PROMPTS[i % 3], of) if numbers[i % 4] else None
        if expected is None:
            expected = engine.generate(PROMPTS[i % 3], max_tokens=NUM_TOKENS)[0].tokens
        assert completion.tokens == expected
    assert Multiples.asked and Others.asked


def test_tokens_that_are_known_cost_no_step(model):
    engine, tokens = with_source(model, lookahead=False), list[int]()
    request_id = engine.add_request([1, 2, 3], max_tokens=NUM_TOKENS, grammar="3")
    steps = 0
    while engine.has_work:
        steps += 1
        tokens += [out.token for out in engine.step() if out.request_id == request_id]
    known = sum(after(3, token) is not None for token in tokens[:-1])
    assert tokens == masked(model, [1, 2, 3], 3)
    assert known >= NUM_TOKENS // 4
    assert steps <= NUM_TOKENS - known + 1


def test_a_fork_goes_on_in_a_copy_of_the_constraint(model):
    engine = with_source(model)
    parent = engine.add_request(PROMPTS[0], max_tokens=4, grammar="3", keep=True)
    while engine.has_work:
        engine.step()
    of_parent = engine.request(parent)
    child = engine.fork(parent)
    of_child = engine.request(child)
    assert of_child.constraint is not of_parent.constraint
    assert of_child.constraint.of == 3
    tokens = list[int]()
    while engine.has_work:
        tokens += [out.token for out in engine.step()]
    assert of_parent.generated + tokens == masked(model, PROMPTS[0], 3)[:8]
