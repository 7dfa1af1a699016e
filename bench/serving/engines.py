"""The engines by name, how each is made for a workload, and the model that they run."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from bench.flags.engines import ENGINES, LLAMA_CPP, STATIC
from bench.models import copying_llama, first_layers, named_model, one_random_layer, vocab_size
from bench.names import MODELS
from bench.serving.servers import BatchServer, PagedServer, SequentialServer, Server, StaticBatches
from bench.serving.trace import Trace
from mlx_paged.arguments import missing
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.kv.shapes import block_bytes
from mlx_paged.launched import rank
from mlx_paged.loading import load_model as load
from mlx_paged.options import KVBits, PoolConfig
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.ranks import joined

ANY_VOCAB = 2**15  # ids of a trace for servers that get text


VARIANTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "mlx_paged_ngram": lambda model: {"speculate": "ngram"},
    "mlx_paged_draft": lambda model: {"draft_model": first_layers(model, 1)},
    "mlx_paged_useless": lambda model: {"draft_model": one_random_layer(model.args.vocab_size)},
    "mlx_paged_disk": lambda model: {"kv_disk": mkdtemp(prefix="kv_disk")},
}
"""Arguments of mlx_paged's engine by name: the first layer drafts, or a useless random one; K/V
goes to a disk, too."""

GGUF = "llama_cpp_gguf"
"""It runs the GGUF file that the model was made of; the others run the model's float32 weights."""


@dataclass(frozen=True)
class Limits:
    """What the engines are given; all but :data:`OF_LLAMA_CPP` are arguments of mlx_paged's, too.

    `prefill_chunk` are prompt tokens computed at a time: of all sequences together in mlx_paged and
    llama_cpp, of each sequence elsewhere. From `block_size` on, only mlx_paged has them.
    """

    max_running: int  # sequences side by side at most
    prefill_chunk: int
    context: int  # K/V tokens of the longest sequence; llama_cpp reserves so many for each place
    block_size: int
    num_blocks: int
    max_stall_ms: float | None = None
    policy: str = "fcfs"
    prefix_cache: bool = True
    kv_bits: KVBits = None
    gguf: Path | None = None  # the file of llama_cpp_gguf


OF_LLAMA_CPP = {"context", "gguf"}


def load_model(name: str) -> tuple[nn.Module, int]:
    """A model and the size of its vocabulary; ValueError if it cannot be loaded. `name` is "demo",
    "copying", one of :data:`bench.models.MODELS`, a directory or a hub id. Ranks share it."""
    if name == "copying":
        return joined(copying_llama()), vocab_size("reference")
    if name in MODELS:
        return joined(named_model(name)), vocab_size(name)
    model, tokenizer = load(None if name == "demo" else name)
    args = getattr(model, "args", None)
    return joined(model), int(getattr(args, "vocab_size", None) or tokenizer.vocab_size)


def check_engines(
    names: Sequence[str], model: nn.Module | None, max_running: int, gguf: Path | None = None
) -> None:
    """Before anything is measured: ValueError if an engine is missing or cannot run the model."""
    if rank() is not None and {*names} - {"mlx_paged", "mlx_paged_ngram"}:
        raise ValueError("--engines: expected only mlx_paged or mlx_paged_ngram under mlx.launch")
    llamas = {name.removesuffix(STATIC) for name in names} & LLAMA_CPP.keys()
    if not llamas:
        return
    if any(importlib.util.find_spec(module) is None for module in ("llama_cpp", "gguf")):
        raise ValueError(f"--engines: llama_cpp: {missing('llama-cpp-python or gguf', 'peers')}")
    from bench.serving.llama_cpp import check_context

    assert model is not None
    if GGUF in llamas and gguf is None:
        raise ValueError(f"--engines: {GGUF}: expected a --model with one GGUF file beside it")
    try:
        check_context(model if llamas - {GGUF} else None, max_running)
    except ValueError as error:
        raise ValueError(f"--engines: llama_cpp: {error}") from error


def is_on_mlx(name: str) -> bool:
    """Whether MLX's memory is that of an engine."""
    return name.removesuffix(STATIC) not in LLAMA_CPP and not is_url(name)


def is_url(name: str) -> bool:
    """Whether an engine is a server over HTTP."""
    return "://" in name


def make_server(name: str, model: nn.Module, limits: Limits) -> Server:
    """`name` is one of :data:`ENGINES` and has passed :func:`check_engines`."""
    if name.endswith(STATIC):
        inner = make_server(name.removesuffix(STATIC), model, limits)
        return StaticBatches(inner, limits.max_running)
    if name == "mlx_paged" or name in VARIANTS:
        options = {key: value for key, value in vars(limits).items() if key not in OF_LLAMA_CPP}
        more = VARIANTS[name](model) if name in VARIANTS else {}
        return PagedServer(model, **options, **more)
    if name == "mlx_lm":
        return BatchServer(model, limits.max_running, limits.prefill_chunk)
    if name == "sequential":
        return SequentialServer(model, limits.prefill_chunk)
    return _llama_server(name, model, limits)


def _llama_server(name: str, model: nn.Module, limits: Limits) -> Server:
    from bench.serving.llama_cpp import LlamaContext, LlamaServer

    llama = LlamaContext(
        model,
        gguf=limits.gguf if name == GGUF else None,
        num_sequences=limits.max_running,
        context=limits.context,
        max_tokens=limits.max_running + limits.prefill_chunk,
        **LLAMA_CPP[name],
    )
    cells = mx.float16 if LLAMA_CPP[name]["is_half"] else mx.float32
    return LlamaServer(llama, limits.prefill_chunk, kv_token_bytes(model, dtype=cells))


def static_sibling(name: str) -> str | None:
    """The same engine without top-up; None if there is none, or `name` is one."""
    sibling = name + STATIC
    return sibling if sibling in ENGINES else None


def enough_blocks(trace: Trace, max_running: int, block_size: int) -> int:
    """A pool in which the `max_running` largest sequences fit side by side, with a little room."""
    blocks = sorted((b for b, n in _blocks(trace, block_size) for _ in range(n)), reverse=True)
    needed = sum(blocks[:max_running])
    return needed + needed // 50 + 2 * max_running


def static_blocks(trace: Trace, max_running: int, block_size: int) -> int:
    """Blocks of a static reservation: the longest sequence for every place."""
    blocks = _blocks(trace, block_size)
    places = min(max_running, sum(count for _, count in blocks))
    return places * max(needed for needed, _ in blocks)


def kv_token_bytes(model: nn.Module, kv_bits: KVBits = None, dtype: mx.Dtype | None = None) -> int:
    """K/V bytes of one token of one sequence in all layers. `dtype`: of its numbers, if not the
    model's."""
    profile = probe(model).stored_by(PoolConfig(kv_bits=kv_bits))
    shapes = [shape for shape in profile.shapes if shape is not None]
    return block_bytes([replace(s, dtype=dtype or s.dtype) for s in shapes], block_size=1)


def _blocks(trace: Trace, block_size: int) -> list[tuple[int, int]]:
    """For each job, blocks of one sample and the number of samples."""
    return [(ceil_div(job.kv_tokens, block_size), job.samples) for job in trace]
