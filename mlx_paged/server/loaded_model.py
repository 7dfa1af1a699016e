"""A loaded model and its engine: both are made and released here."""

import argparse
import asyncio
import gc
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import mlx.core as mx

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.service import EngineService
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.default_pool import largest_default
from mlx_paged.loading import load_with_config, of_another_model
from mlx_paged.outputs import describe
from mlx_paged.protocol.model_traits import ModelTraits, format_of, traits_of
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.runner.positions import positions
from mlx_paged.runner.ranks import joined
from mlx_paged.server import heap
from mlx_paged.server.flags import engine_options
from mlx_paged.vision.host import image_processor

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HELD = 1 << 30
"""Bytes of processed images that the requests of a model hold, unless one of them has more."""


@dataclass(eq=False, slots=True, kw_only=True)
class Model(ModelTraits):
    """A loaded model and its engine."""

    name: str
    service: EngineService
    taken: int = 0  # completions that run or wait
    held: int = 0  # bytes of their images
    last_used: float = field(default_factory=time.monotonic)  # when `taken` changed
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.service.is_running

    def take(self, change: int) -> None:
        self.taken += change
        self.last_used = time.monotonic()
        (self.idle.clear if self.taken else self.idle.set)()

    def holdings(self) -> list[Holding]:
        """What the server holds for this model's requests."""
        return [Holding("images_of_requests", self.held, MAX_HELD, CountedBy.HEAP)]

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold so many bytes of images. Raises Refusal beside others if all are too many."""
        if size and self.held and self.held + size > MAX_HELD:
            message = f"{self.held} bytes of images are held for others: try again later"
            raise Refusal(503, message, "overloaded")
        self.held += size
        try:
            yield
        finally:
            self.held -= size


def make(path: str, args: argparse.Namespace, places: int, trusts: bool) -> Model:
    """Load a model and start its engine with one of `places` equal parts of the pool's memory. If
    the operator `trusts` it, its own code may run. Raises ValueError if it cannot be loaded or
    served."""
    args = _arguments(path, args)
    model, tokenizer, config = _read(path, args, trusts, is_lazy=False)
    try:
        model = joined(model)
        if args.use_default_chat_template and tokenizer.chat_template is None:
            tokenizer.chat_template = tokenizer.default_chat_template
            tokenizer.has_chat_template = True
    except Exception as error:
        raise ValueError(f"model {path}: {describe(error)}") from error
    form, abilities = format_of(tokenizer, args.tool_format, args.reasoning_format)
    options = engine_options(args)
    if options["kv_memory"] is not None:
        options["kv_memory"] //= max(1, args.max_models)
    elif places > 1:
        options["kv_memory"] = largest_default() // places
    engine = Engine(model, tokenizer, prewarm=None, **options)
    LOGGER.info("%s: %s", path, engine.memory_budget.line)
    engine.constraints.warm_up()
    own, allocator = positions(config), engine.manager.allocator
    wanted = args.max_context or own
    if wanted and own and wanted > own:
        LOGGER.warning("--max-context is %d, but %s has %d positions", wanted, path, own)
    # The last token needs no K/V.
    tokens = range(wanted or 1 << 40)
    room = bisect_right(tokens, allocator.num_blocks, key=allocator.max_blocks)
    if wanted and room < wanted:
        LOGGER.warning("%s: the KV pool has room for %d of %d tokens", path, room, wanted)
    if abilities.tools_problem:
        LOGGER.warning("%s takes no tools: %s", path, abilities.tools_problem)
    traits = traits_of(
        tokenizer,
        form,
        abilities,
        engine.token_ids,
        max_context=room,
        has_states=engine.manager.profile.states.exist,
        image_processor=image_processor(model),
    )
    service = EngineService(engine).start()
    try:
        service.call(lambda engine: None)  # it returns when the service has traced its decodes
    except BaseException as error:
        release(service)
        if not isinstance(error, RuntimeError):
            raise
        raise ValueError(f"model {path}: {describe(error.__cause__ or error)}") from error
    given = {each.name: getattr(traits, each.name) for each in fields(traits)}
    return Model(name=path, service=service, **given)


def check(path: str, args: argparse.Namespace, trusts: bool) -> None:
    """Raise ValueError if the model or its tokenizer cannot be loaded. The weights are not read."""
    args = _arguments(path, args)
    if not args.vision:  # mlx-vlm reads all
        _read(path, args, trusts, is_lazy=True)


def _arguments(path: str, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments for the model at `path`."""
    if path == args.model:
        return args
    args = of_another_model(args)
    args.tool_format = args.reasoning_format = None
    return args


def _read(path: str, args: argparse.Namespace, trusts: bool, is_lazy: bool) -> Any:
    """The model, its tokenizer and its configuration, as :func:`load_with_config` gives them."""
    template = {"chat_template": args.chat_template} if args.chat_template else {}
    return load_with_config(
        path, args.adapter_path, trusts, sees=args.vision, is_lazy=is_lazy, **template
    )


def release(service: EngineService) -> None:
    with suppress(RuntimeError):  # it has failed or was closed
        service.call(lambda engine: engine.close())
    service.close()


class LoadingThread:
    """One thread, which loads and releases models: MLX keeps a thread of its own for each thread
    that has computed, even after that thread has ended."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "mlx_paged.server.loading")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function` there, to its end also if this call is cancelled."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._executor, function, *args)
        try:
            return await asyncio.shield(work)
        finally:
            await asyncio.wait([work])

    def close(self) -> None:
        """End the thread, if it has not ended before."""
        with suppress(RuntimeError):  # it has
            self._executor.submit(mx.clear_streams)  # by the thread that made them
        self._executor.shutdown()


def give_back() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    mx.clear_cache()
    heap.trim()
