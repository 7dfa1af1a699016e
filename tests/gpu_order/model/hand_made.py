"""One small trace for each rule of the model, whose verdict needs that rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.gpu_order.model.backend import Report, judge
from tests.gpu_order.model.rules import ALL_RULES, Rule
from tests.gpu_order.model.trace import (
    Access,
    Array,
    Binding,
    Completed,
    Eval,
    Free,
    HostWait,
    Op,
    Role,
    Synchronize,
    Trace,
)

MILLION = 1 << 20
Verdict = Callable[[Report], object]


def hazards(report: Report) -> list[str]:
    """The kinds of the hazards, each once."""
    return sorted({hazard.kind for hazard in report.hazards})


def command_buffers(report: Report) -> list[int]:
    return report.command_buffers


@dataclass(frozen=True)
class Case:
    """A trace and its verdict.

    Attributes:
        expected: the verdict by all rules.
        without: the verdict if the rule is knocked out.
    """

    trace: Trace
    expected: object
    without: object
    verdict: Verdict = hazards

    def judged(self, rules: frozenset[Rule] = ALL_RULES) -> object:
        return self.verdict(judge(self.trace, rules))


def op(reads: Sequence[Array] = (), writes: Sequence[Array] = (), **options: object) -> Op:
    """An op of MLX's own, with new outputs."""
    bindings = [Binding(array, Role.INPUT) for array in reads]
    bindings += [Binding(array, Role.OUTPUT) for array in writes]
    given = {"inputs": tuple(reads), "outputs": tuple(writes), "bindings": tuple(bindings)}
    return Op("op", **(given | options))  # type: ignore[arg-type]


def bound(role: Role, *, writes: bool = False, array: Array = "pool", elements: int = 0) -> Op:
    """An op that touches one array and binds it in this way."""
    return Op("op", bindings=(Binding(array, role, elements),), accesses=(Access(array, writes),))


READ, WRITE = bound(Role.INPUT), bound(Role.OUTPUT, writes=True)
POOL_READ, POOL_WRITE = bound(Role.POOL_READ), bound(Role.POOL_WRITE, writes=True)


def evals(*groups: Sequence[Op], waits: bool = False) -> Trace:
    """An eval of each group, none of which the host waits for but the first, if it `waits`."""
    return [Eval(tuple(ops), f"eval {i}", waits and i == 0) for i, ops in enumerate(groups)]


def _pool_in_a_context() -> list[Op]:
    options = {"outputs": (), "context": "one"}
    return [op([], ["pool"], **options), op(["pool"], [], **options)]


def _completed_before_its_reader() -> Trace:
    first, second, third = evals([POOL_WRITE], [POOL_WRITE], [POOL_READ])
    return [first, second, Completed("eval 0"), third]


def _freed_under_way() -> Trace:
    made = op([], ["x"])
    first, second = evals([op(["x"], ["y"])], [op([], ["z"])])
    return [*evals([made], waits=True), first, Free("x"), second]


def _updated_under_way() -> Trace:
    update = op(["x"], ["z"], donates={"z": "x"})
    return [*evals([op([], ["x"])], waits=True), *evals([op(["x"], ["y"])], [update])]


CASES: dict[Rule, Case] = {
    Rule.INPUT_AFTER_OUTPUT: Case(evals([WRITE, READ]), [], ["RAW"]),
    Rule.OUTPUT_AFTER_INPUT: Case(evals([READ, WRITE]), [], ["WAR"]),
    Rule.OUTPUT_IS_INPUT: Case(evals([WRITE], [bound(Role.OUTPUT, writes=True)]), [], ["WAW"]),
    Rule.BARRIER_KEEPS_ITS_DISPATCH: Case(
        evals([op([], ["x"]), op(["x"], ["y"]), op(["y"], ["z"])]), [], ["RAW"]
    ),
    Rule.CONCURRENT: Case(evals(_pool_in_a_context()), ["RAW"], []),
    Rule.FENCE: Case(evals([WRITE], [READ]), [], ["RAW"]),
    Rule.FENCE_IGNORES_INPUTS: Case(evals([READ], [WRITE]), ["WAR"], []),
    Rule.SET_BUFFER_IS_BOTH: Case(evals([POOL_READ], [POOL_WRITE]), [], ["WAR"]),
    Rule.SET_BUFFER_HAS_NO_BARRIER: Case(
        evals([bound(Role.BUFFER, writes=True), bound(Role.BUFFER)]), ["RAW"], []
    ),
    Rule.TEMPORARIES: Case(evals([bound(Role.TEMPORARY, writes=True)], [READ]), ["RAW"], []),
    Rule.OWN_FENCE: Case(_completed_before_its_reader(), [], ["RAW"]),
    Rule.COMMIT_BY_OPS: Case(evals([op([f"x{i}"]) for i in range(42)]), [2], [1], command_buffers),
    Rule.COMMIT_BY_ELEMENTS: Case(
        evals([bound(Role.INPUT, elements=41 * MILLION), READ]), [2], [1], command_buffers
    ),
    Rule.COUNT_ONCE: Case(
        evals([bound(Role.POOL_READ, elements=41 * MILLION), READ]), [1], [2], command_buffers
    ),
    Rule.EVAL_COMMITS: Case(evals([READ], [WRITE]), ["WAR"], []),
    Rule.HELD_UNTIL_COMPLETE: Case(_freed_under_way(), [], ["WAR"]),
    Rule.DONATION: Case(_updated_under_way(), [], ["WAR"]),
    Rule.FENCE_BETWEEN_STREAMS: Case(
        evals([op([], ["x"]), op(["x"], ["y"], stream=1)]), [], ["RAW"]
    ),
    Rule.EVENT_BETWEEN_EVALS: Case(
        evals([op([], ["x"])], [op(["x"], ["y"], stream=1)]), [], ["RAW"]
    ),
    Rule.HOST_WAIT: Case(evals([READ], [WRITE], waits=True), [], ["WAR"]),
    Rule.SYNCHRONIZE: Case([*evals([READ]), Synchronize(), *evals([WRITE])], [], ["WAR"]),
}
"""The trace of each rule, but of WIDTH_LIMIT, which orders a graph before there is a trace."""

HOST_READS = [*evals([op([], ["x"]), READ]), HostWait("x"), *evals([WRITE])]
"""The host reads one result of an eval; then all of the eval is done."""
