"""Jinja templates that count what they do."""

import operator
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlx_paged.chat.budget import OPERATORS, STEP_BYTES, WHOLE, listed, spending

INSIDE = "_loop_vars", "_block_vars"
"""Arguments that Jinja adds to a call."""
COUNTED = Macro, LoopContext, BlockReference
"""What is called with arguments that it does not look into, and counts what it does."""


def bounded(sandbox: SandboxedEnvironment, text: str) -> Template:
    """A template that renders `text` as a sandbox does, within the budget that is active."""
    environment: Any = sandbox.overlay()
    environment.globals = {k: v for k, v in environment.globals.items() if k != "lipsum"}
    environment.filters = {
        name: _counting_filter(name, each) for name, each in environment.filters.items()
    } | {"_step": _step, "_weighed": _weighed, "_sliced": _sliced, "_compared": _compared}
    environment.tests = {
        name: _counting_test(name, each) for name, each in environment.tests.items()
    }
    environment.call = partial(_call, environment)
    environment.intercepted_binops = frozenset(OPERATORS)
    environment.binop_table = environment.binop_table | {
        sign: partial(_operate, function) for sign, function in OPERATORS.items()
    }
    environment.concat = _concat
    tree = environment.parse(text)
    _Counting().visit(tree)
    tree.set_environment(environment)
    template: Template = environment.from_string(tree)
    return template


class _Counting(NodeTransformer):
    """Puts a step into each turn of a loop, and weighs what operators read."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        step = _filtered("_step", nodes.Const(True, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        is_text = nodes.TemplateData
        node.nodes = [x if isinstance(x, is_text) else _filtered("_weighed", x) for x in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_filtered("_weighed", each) for each in node.nodes]
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _filtered("_weighed", node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered("_sliced", node.node)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _filtered("_weighed", node.arg)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        parts, left = list[nodes.Expr](), node.expr
        for operand in node.ops:
            parts.append(_filtered("_compared", left, nodes.Const(operand.op), operand.expr))
            left = operand.expr
        whole = parts[0]
        for part in parts[1:]:
            whole = nodes.And(whole, part, lineno=node.lineno)
        return whole


def _filtered(name: str, value: nodes.Expr, *arguments: nodes.Expr) -> nodes.Expr:
    """A value behind a filter."""
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


@pass_context
def _step(context: Context, value: Any) -> Any:  # with a context it is no constant
    spending().spend(1)
    return value


def _weighed(value: Any) -> Any:
    spending().weigh(value)
    return value


def _sliced(value: Any) -> Any:
    spending().slice(value)
    return value


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "gt": operator.gt},
    **{"lteq": operator.le, "gteq": operator.ge},
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}
"""By Jinja's names."""


def _compared(left: Any, name: str, right: Any) -> Any:
    right = listed(right)
    if name in ("in", "notin"):
        spending().search(left, right)
    else:
        spending().compare(left, right)
    return COMPARISONS[name](left, right)


def _call(
    environment: SandboxedEnvironment, context: Any, function: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """What a call within a template does, in place of the sandbox's own."""
    budget = spending()
    if isinstance(function, COUNTED):
        budget.spend(1)
        return type(environment).call(environment, context, function, *args, **kwargs)
    given = [listed(each) for each in args]
    named = [value for name, value in kwargs.items() if name not in INSIDE]
    # A format's method is wrapped by the sandbox.
    method = getattr(function, "__wrapped__", function)
    owner = getattr(method, "__self__", None)
    budget.enter(getattr(method, "__name__", ""), owner, [*given, *named])
    return budget.leave(type(environment).call(environment, context, function, *given, **kwargs))


def _operate(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    budget = spending()
    budget.spend(1)
    return budget.leave(function(left, right))


def _concat(pieces: Iterable[str]) -> str:
    """The text of a template, a macro or a block."""
    budget, found = spending(), list[str]()
    for piece in pieces:
        budget.spend(1 + len(piece) // STEP_BYTES)
        found.append(piece)
    return "".join(found)


def _counting_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `name`, which spends what it takes."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context or the like

    @wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        budget, value = spending(), args[first]
        value = listed(value) if name in WHOLE else value
        budget.enter(name, value, [*args[first + 1 :], *kwargs.values()])
        return budget.leave(function(*args[:first], value, *args[first + 1 :], **kwargs))

    return counting


def _counting_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The test `name`, which spends what it takes."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counting(*args: Any) -> Any:
        budget, (value, *others) = spending(), args[first:]
        others = [listed(each) for each in others]
        if name == "in":
            budget.search(value, *others)
        elif others:
            budget.compare(value, *others)
        else:
            budget.spend(1)
        return function(*args[:first], value, *others)

    return counting
