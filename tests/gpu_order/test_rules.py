"""Each rule of the model decides a verdict, and graphs are ordered as MLX orders them."""

import random
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_paged import ops
from tests.gpu_order.model.backend import judge
from tests.gpu_order.model.graph import Graph
from tests.gpu_order.model.hand_made import CASES, HOST_READS, POOL_READ, POOL_WRITE, evals, hazards
from tests.gpu_order.model.rules import ALL_RULES, Rule


def test_every_rule_has_a_trace():
    assert CASES.keys() | {Rule.WIDTH_LIMIT} == ALL_RULES


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.name)
def test_a_rule_that_is_knocked_out_flips_its_verdict(rule):
    case = CASES[rule]
    assert case.judged() == case.expected != case.without
    assert case.judged(ALL_RULES - {rule}) == case.without


def test_the_host_waits_for_all_of_an_eval_when_it_reads_one_result():
    assert not judge(HOST_READS).hazards
    assert hazards(judge(HOST_READS, ALL_RULES - {Rule.HOST_WAIT})) == ["WAR"]


def test_orders_add_up():
    """The second read waits for the first, and the write waits for the second."""
    assert not judge(evals([POOL_READ], [POOL_READ], [POOL_WRITE])).hazards


class WrittenGraph:
    """A random graph with many writes to one pool, whose content tells their order.

    Each pair of writes has a slot that both write: the later one wins.
    """

    def __init__(self, seed: int, num_writes: int) -> None:
        rng = random.Random(seed)
        self.num_writes = num_writes
        self.pairs = [(i, j) for j in range(num_writes) for i in range(j)]
        pool = mx.zeros((1, len(self.pairs), 1, 4)), mx.zeros((1, len(self.pairs), 1, 4))
        mx.eval(pool)
        self.pool = pool
        terms = [mx.array([float(i)]) for i in range(3)]
        self.written: list[mx.array] = []
        for i in range(num_writes):
            terms.append(sum(rng.choices(terms, k=rng.randint(1, 3)), mx.zeros(1)) * 0)
            slots = [slot for slot, pair in enumerate(self.pairs) if i in pair]
            rows = mx.broadcast_to(mx.array(float(i)) + terms[-1], (len(slots), 1, 4))
            k, _ = ops.write_kv(rows, rows, *pool, mx.array(slots))
            terms.append(k[0, 0, 0, :1] * 0)
            self.written.append(k)
        rng.shuffle(terms)
        self.outputs = [*rng.sample(self.written, num_writes), *terms]

    def modelled(self, **options: int) -> list[int]:
        """The order of the writes by the model."""
        names = {f"out{i}": array for i, array in enumerate(self.outputs)}
        names |= {f"write{i}": array for i, array in enumerate(self.written)}
        graph = Graph(self.outputs, names)
        by_id = {id(array): name for name, array in names.items()}
        order = graph.evaluation_order([by_id[id(array)] for array in self.outputs], **options)
        number = {graph.producer[f"write{i}"]: i for i in range(self.num_writes)}
        return [number[node] for node in order if node in number]

    def real(self) -> list[int]:
        """The order in which MLX executed them."""
        mx.eval(self.outputs)
        winners = self.pool[0][0, :, 0, 0].astype(mx.int32).tolist()
        later = [0] * self.num_writes  # how many other writes each one comes after
        for winner in winners:
            later[winner] += 1
        return sorted(range(self.num_writes), key=later.__getitem__)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_writes", [3, 12, 45])
def test_a_graph_is_evaluated_in_the_order_of_the_model(seed, num_writes):
    graph = WrittenGraph(seed, num_writes)
    modelled = graph.modelled()
    assert modelled == graph.real()


def test_without_the_width_limit_the_order_is_another_one():
    graph = WrittenGraph(0, 45)
    modelled, unlimited = graph.modelled(), graph.modelled(width=10**6)
    assert modelled == graph.real() != unlimited


def test_the_readme_has_every_rule_and_its_source():
    text = (Path(__file__).with_name("README.md")).read_text()
    for rule in Rule:
        assert f"\n| {rule.name} | `{rule.source}` | {rule.statement} |" in text
