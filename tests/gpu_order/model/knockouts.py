"""This package's own fixes, taken back one by one in a trace."""

from collections.abc import Callable
from dataclasses import replace

from tests.gpu_order.model.trace import Binding, Eval, Event, Op, Role

Change = Callable[[Event], Event]

PLAIN = {Role.POOL_READ: Role.INPUT, Role.POOL_WRITE: Role.OUTPUT}
"""How pools were bound before ``register_pool``."""


def unregistered(*primitives: str) -> Change:
    """These primitives bind a pool as any array: as an input if they read it, and counted."""

    def binding(bound: Binding) -> Binding:
        return replace(bound, role=PLAIN.get(bound.role, bound.role))

    def op(bound: Op) -> Op:
        if bound.name not in primitives:
            return bound
        return replace(bound, bindings=tuple(map(binding, bound.bindings)))

    def change(event: Event) -> Event:
        return replace(event, ops=tuple(map(op, event.ops))) if isinstance(event, Eval) else event

    return change


FIXES: dict[str, Change] = {
    "attention registers the pool": unregistered("PagedAttention"),
    "gathers register the pool": unregistered("PoolRead"),
}
"""What :func:`unregistered` takes back, by the fix."""
