"""Compute only the sampled rows where the others are not needed: logits and the last layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from threading import Lock, RLock, local
from typing import Any, TypeVar
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

HEAD_NAMES = {"lm_head", "embed_out", "output", "head"}
_Kept = TypeVar("_Kept")


class _Wanted(local):
    """Rows of a tensor that each thread needs; None: all of them, or they have been taken."""

    rows: mx.array | None = None
    axis = 0
    by_heads = True  # whether output projections may take them
    were_taken = False


class LogitRows:
    """Makes a model's output projection compute only some rows.

    Within :meth:`only` the projection (or the tied embedding) has a subclass that first takes these
    rows of its input, in that thread alone. Parameters and the module tree do not change. A
    projection that another module wraps meanwhile takes no rows any more: the wrapper may compute
    with all rows beside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wanted = _Wanted()
        self._model = ref(model)
        self._overrides = Overrides()
        for name, module in model.named_modules():
            path = name.split(".")
            project = partial(self._project, path)
            if path[-1] in HEAD_NAMES and isinstance(module, nn.Linear | nn.QuantizedLinear):
                self._overrides.add(module, "__call__", project)
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._overrides.add(module, "as_linear", project)

    @classmethod
    def of(cls, model: nn.Module) -> "LogitRows":
        """The model's own; engines on the same model share it."""
        return attached_to(model, "logit_rows", cls)

    @property
    def were_taken(self) -> bool:
        """Whether the latest forward of this thread within :meth:`only` has taken the rows. If not,
        its output has all rows."""
        return self._wanted.were_taken

    @contextmanager
    def only(self, rows: mx.array | None, axis: int, by_heads: bool = True) -> Iterator[None]:
        """Within this context a forward computes the logits of `rows` ``[R]`` of its input's `axis`
        only; None: of all rows. Unless `by_heads`, only :meth:`take` takes them."""
        wanted = self._wanted
        wanted.rows = rows
        wanted.axis = axis
        wanted.by_heads = by_heads
        wanted.were_taken = False
        try:
            with self._overrides:
                yield
        finally:
            wanted.rows = None

    def take(self, x: mx.array) -> mx.array:
        """The rows of `x` that are needed. The projection then takes its whole input."""
        rows, self._wanted.rows = self._wanted.rows, None
        if rows is None:
            return x
        self._wanted.were_taken = True
        return mx.take(x, rows, axis=self._wanted.axis)

    def _project(
        self, path: Sequence[str], projection: Callable[..., mx.array], x: mx.array
    ) -> mx.array:
        wanted = self._wanted
        if wanted.rows is None or not wanted.by_heads or not self._is_at(path, projection):
            return projection(x)
        wanted.were_taken = True
        return projection(mx.take(x, wanted.rows, axis=wanted.axis))

    def _is_at(self, path: Sequence[str], projection: Any) -> bool:
        """Whether the module of this method is where it was found."""
        found: Any = self._model()
        for name in path:
            if isinstance(found, list | tuple):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found is projection.__self__


class _Attached(dict[str, Any]):
    """What is kept on a model. A copy of the model, or what is unpickled, has None instead."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_attaching = RLock()


def attached_to(model: nn.Module, name: str, make: Callable[[nn.Module], _Kept]) -> _Kept:
    """The object that is kept on the model under this name; it is made at the first call."""
    with _attaching:
        own = getattr(model, "_mlx_paged", None)
        if own is None:
            object.__setattr__(model, "_mlx_paged", own := _Attached())
        if name not in own:
            own[name] = make(model)
        kept: _Kept = own[name]
    return kept


def lock_of(model: nn.Module) -> AbstractContextManager[Any]:
    """Held by a thread that reads the model's parameters or, for a trace, replaces them."""
    return attached_to(model, "lock", lambda model: RLock())


def override(module: nn.Module, method: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of this one module by ``replacement(original, *args, **kwargs)``. The
    module's class becomes a subclass of its class. Copies of the module have its first class."""
    module.__class__ = _overriding(type(module), method, replacement)


def _overriding(
    base: type[nn.Module], method: str, replacement: Callable[..., Any]
) -> type[nn.Module]:
    """A subclass with this method, whose instances are copied as those of the first class."""
    plain = getattr(base, "_mlx_paged_plain", base)

    def overridden(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = getattr(base, method)  # which a forward on a CPU may divert
        return replacement(original.__get__(self), *args, **kwargs)

    def reduced(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        content: Any = object.__reduce_ex__(self, max(protocol, 2))
        return plain.__new__, (plain,), *content[2:]

    members = {method: overridden, "__reduce_ex__": reduced, "_mlx_paged_plain": plain}
    members["__module__"] = base.__module__
    return type(base.__name__, (base,), members)


class Overrides:
    """Replaces methods of modules, as :func:`override` does, while any thread is inside of its
    context. Contexts may nest, and overlap in several threads; the last one restores the classes.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_inside = 0
        self._each: list[_Overridden] = []

    def add(self, module: nn.Module, method: str, replacement: Callable[..., Any]) -> None:
        """Replace this method, too."""
        self._each.append(_Overridden(module, method, replacement))

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                for each in self._each:
                    each.begin()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                for each in self._each:
                    each.end()


class _Overridden:
    """A method of a module that is replaced between :meth:`begin` and :meth:`end`."""

    def __init__(self, module: nn.Module, method: str, replacement: Callable[..., Any]) -> None:
        self._module = ref(module)
        self._make = cache(partial(_overriding, method=method, replacement=replacement))
        self._own: type[nn.Module] | None = None  # the class meanwhile

    def begin(self) -> None:
        module = self._module()
        # It may have the class still: another class was made of that one meanwhile.
        if module is not None and (self._own is None or not isinstance(module, self._own)):
            self._own = self._make(type(module))  # type: ignore[arg-type]
            module.__class__ = self._own

    def end(self) -> None:
        module = self._module()
        if module is not None and type(module) is self._own:
            module.__class__ = self._own.__base__


WORTH_SKIPPING = 16
"""Skipping the last layer of fewer tokens saves less time than a second call of it costs."""


class _OfThread(local):
    """The tokens of each thread's forward, each a row, and what happens before both calls of the
    layer."""

    num_tokens: int | None = None
    store_only: Callable[[], None]
    attend_only: Callable[[], None]


class LastLayer:
    """Makes a model's last layer compute only the sampled tokens.

    Only sampled tokens need the last layer's output; the others need only their K/V. So the layer
    is called twice: first with all tokens, of which only the K/V is ever evaluated because arrays
    are lazy; then with the sampled ones, whose output goes to the model's head. Within
    :meth:`narrowed` the layer has a subclass for that, which acts in that thread alone. Parameters
    and the module tree do not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_thread = _OfThread()
        self._logit_rows = LogitRows.of(model)
        self._overrides = Overrides()
        layers = getattr(model, "layers", None)
        if isinstance(layers, list) and layers and isinstance(layers[-1], nn.Module):
            self._overrides.add(layers[-1], "__call__", self._call)

    @classmethod
    def of(cls, model: nn.Module) -> "LastLayer":
        """The model's own; engines on the same model share it."""
        return attached_to(model, "last_layer", cls)

    @contextmanager
    def narrowed(
        self, num_tokens: int, store_only: Callable[[], None], attend_only: Callable[[], None]
    ) -> Iterator[None]:
        """Within this context the last layer computes only the rows that :class:`LogitRows` is told
        to compute, of `num_tokens`. The other arguments prepare the caches for the two calls."""
        own = self._of_thread
        own.num_tokens = num_tokens
        own.store_only, own.attend_only = store_only, attend_only
        try:
            with self._overrides:
                yield
        finally:  # the caches keep an engine's pool alive, and the model keeps this object
            own.num_tokens = None
            del own.store_only, own.attend_only

    def _call(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = self._of_thread
        if not args or args[0].shape[0] != own.num_tokens:
            return layer(*args, **kwargs)
        own.store_only()
        layer(*args, **kwargs)
        own.attend_only()
        return layer(self._logit_rows.take(args[0]), *args[1:], **kwargs)
