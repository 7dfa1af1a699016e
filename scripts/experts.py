"""Decodes and a prompt of a model with experts on a CPU, beside mlx-lm or llama.cpp.

    python -m scripts.experts                     # float32, beside mlx-lm
    python -m scripts.experts --format 4bit       # 4 bits, beside llama.cpp on the same numbers

The model has the layers of Qwen3-30B-A3B with about a billion random weights: 128 experts, of which
a token chooses 8. Engines take turns; a turn is some decode steps of all rows, or one prompt.
"share" is `limit / time`. The limit is the longer of two times, both at rates that were measured in
the same turns: reading all weights but the embeddings and the experts that no row chose, or
multiplying the rows. Chosen experts are counted in steps of an engine. The last line is one JSON
object.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.models.switch_layers import SwitchGLU

from bench.command import add_rounds, make_parser, print_result, table
from bench.machine import check_machine, cores, linear_gflops, machine_text
from bench.pairs import in_turns, ratio
from bench.serving.engines import Limits, check_engines, make_server
from bench.serving.servers import Server
from bench.serving.trace import Job
from mlx_paged import Engine
from mlx_paged.cli import COUNT
from mlx_paged.doctor.speed import GB, MemoryReader

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
GROUP, BITS, MIDDLE = 32, 4, 8  # of GGUF's Q4_0
FORMATS = {"float32": "mlx_paged,mlx_lm", "4bit": "mlx_paged,llama_cpp_f16"}
"""Weights, and the engines that they are run by."""

SHORT = 16  # prompt tokens before decodes
COUNTED = 4  # steps in which experts are counted


def build(config: dict[str, Any], weights: str) -> nn.Module:
    """A model with random weights of a format in :data:`FORMATS`: in 4 bits, numbers of Q4_0."""
    mx.random.seed(0)
    model: nn.Module = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    if weights == "4bit":
        model.set_dtype(mx.float16)
        nn.quantize(model, GROUP, BITS, class_predicate=_is_quantized)
        for _, layer in model.named_modules():
            if "scales" in layer:
                layer.biases = -MIDDLE * layer.scales
    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
    model.eval()
    return model


def _is_quantized(path: str, layer: nn.Module) -> bool:
    """All layers that can be, but routers."""
    return hasattr(layer, "to_quantized") and not path.endswith("mlp.gate")


Chosen = dict[int, list[mx.array]]
"""By layer, the experts of each of its calls."""


@contextmanager
def recorded() -> Iterator[Chosen]:
    """The experts that layers are asked for within this context."""
    call, chosen = SwitchGLU.__call__, Chosen()

    def recording(layer: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        chosen.setdefault(id(layer), []).append(indices.flatten())
        result: mx.array = call(layer, x, indices)
        return result

    with patch.object(SwitchGLU, "__call__", recording):
        yield chosen


def distinct_experts(model: nn.Module, rows: int, prompt: int) -> float:
    """Experts that some row of a step chooses: a layer's mean. With `prompt`, the step computes
    that many tokens of one prompt; otherwise `rows` requests decode."""
    options: dict[str, Any] = {"compile": False, "max_running": rows, "prefix_cache": False}
    engine = Engine(model, prefill_chunk=max(prompt, SHORT * rows), **options)
    counts = list[int]()
    for job in jobs(model, rows, prompt or SHORT, COUNTED + 1):
        engine.add_request(list(job.prompt), max_tokens=job.max_tokens)
    if not prompt:
        while len(engine.step()) < rows:
            pass
    for _ in range(1 if prompt else COUNTED):
        with recorded() as chosen:
            engine.step()
        layers = (mx.concatenate(calls) for calls in chosen.values())
        counts += [len(np.unique(np.array(each))) for each in layers]
    return float(np.mean(counts))


def costs(model: nn.Module, tokens: int, logits: int, distinct: float) -> tuple[float, float]:
    """Bytes that a step of so many tokens reads of the weights, and the operations of its products.
    `logits`: rows of the head's product."""
    args: Any = model.args
    num_bytes = operations = 0.0
    for name, array in tree_flatten(model.parameters()):
        if "embed_tokens" in name:
            continue
        is_expert = "switch_mlp" in name
        num_bytes += array.nbytes * (distinct / args.num_experts if is_expert else 1)
        if name.endswith(".weight"):
            size = array.size * (8 if array.dtype == mx.uint32 else 1)
            part = args.num_experts_per_tok / args.num_experts if is_expert else 1
            rows = logits if name.startswith("lm_head") else tokens
            operations += 2 * rows * size * part
    return num_bytes, operations


def jobs(model: nn.Module, rows: int, prompt: int, max_tokens: int) -> list[Job]:
    """Requests of random tokens."""
    vocab: int = model.args.vocab_size
    ids = np.random.default_rng(0).integers(vocab, size=(rows, prompt))
    return [Job(0.0, tuple(row.tolist()), max_tokens) for row in ids]


def decodes(server: Server, work: Sequence[Job], steps: int) -> Callable[[], float]:
    """A function that computes some steps in which all requests decode; returns the median ms."""
    for i, job in enumerate(work):
        server.submit(job, [i])
    while len(server.step()) < len(work):
        pass

    def turn() -> float:
        laps = []
        for _ in range(steps):
            started = time.perf_counter()
            server.step()
            laps.append(1000 * (time.perf_counter() - started))
        return median(laps)

    return turn


def prompts(server: Server, job: Job) -> Callable[[], float]:
    """A function that computes one token after a prompt; returns ms."""

    def turn() -> float:
        started = time.perf_counter()
        server.submit(job, [0])
        while server.has_work:
            server.step()
        return 1000 * (time.perf_counter() - started)

    return turn


def compare(model: nn.Module, rows: int, prompt: int, args: argparse.Namespace) -> dict[str, Any]:
    """Decodes of `rows` requests, or a prompt if it is not 0."""
    turns = args.rounds + 1
    work = jobs(model, rows, prompt or SHORT, 1 if prompt else turns * args.steps + SHORT)
    context = max(job.kv_tokens for job in work) + 1
    blocks = rows * (context // 16 + 2) + 8
    limits = Limits(rows, max(prompt, SHORT * rows), context, 16, blocks, prefix_cache=False)
    engines = args.engines.split(",")
    reader = MemoryReader(cores())
    courses: dict[str, Callable[[], float]] = {
        "read": lambda: _seconds(reader.read),
        "GEMM": partial(linear_gflops, mx.float32),
    }
    for name in engines:
        server = make_server(name, model, limits)
        courses[name] = prompts(server, work[0]) if prompt else decodes(server, work, args.steps)
    found = in_turns(courses, args.rounds, warm_up=1)
    distinct = distinct_experts(model, rows, prompt)
    num_bytes, operations = costs(model, prompt or rows, rows, distinct)
    gb_s = [reader.num_bytes / each / GB for each in found["read"]]
    limit = max(num_bytes / GB / median(gb_s), operations / 1e9 / median(found["GEMM"])) * 1000
    result: dict[str, Any] = {"rows": rows, "prompt": prompt, "experts": round(distinct, 1)}
    result |= {f"{name} ms": round(median(found[name]), 2) for name in engines}
    for name in engines[1:]:
        of = ratio(found[name], found[engines[0]])
        result[f"{name} over ours"] = f"{of.median:.2f} ({of.lowest:.2f} to {of.highest:.2f})"
    result |= {"read GB/s": round(median(gb_s), 1), "GFLOP/s": round(median(found["GEMM"]))}
    share = limit / median(found[engines[0]])
    return result | {"limit ms": round(limit, 2), "share": round(share, 2)}


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("experts", (__doc__ or "").splitlines()[0], "scripts")
    parser.add_argument("--format", choices=FORMATS, default="float32", help="of the weights")
    parser.add_argument("--engines", help="default: mlx_paged and mlx_lm, or llama_cpp_f16")
    parser.add_argument("--rows", type=COUNT, nargs="+", default=[1, 8, 16], help="that decode")
    parser.add_argument("--prompt", type=COUNT, default=512, help="tokens of the prompt")
    parser.add_argument("--steps", type=COUNT, default=12, help="of a turn")
    parser.add_argument("--layers", type=COUNT, default=CONFIG["num_hidden_layers"])
    add_rounds(parser, 5)
    args = parser.parse_args(argv)
    args.engines = args.engines or FORMATS[args.format]
    mx.set_default_device(mx.Device(mx.cpu))
    machine = check_machine()
    model = build(CONFIG | {"num_hidden_layers": args.layers}, args.format)
    try:
        check_engines(args.engines.split(","), model, max(args.rows))
    except ValueError as error:
        parser.error(str(error))
    cases = [*((rows, 0) for rows in args.rows), (1, args.prompt)]
    found = [compare(model, *case, args) for case in cases]
    print(machine_text(machine))
    print(table([[*found[0]], *[[str(value) for value in each.values()] for each in found]]))
    print_result("experts", {**machine, "format": args.format, "results": found})


if __name__ == "__main__":
    main()
