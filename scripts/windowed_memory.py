"""K/V that models with sliding windows hold in an engine, beside mlx-lm's own caches.

    python -m scripts.windowed_memory
    python -m scripts.windowed_memory --models gemma3 --windows 64 --prompt-tokens 6000 --chats 0

Tiny random models with the layers of real ones. Nothing is timed, and the same arguments print the
same numbers. First each prompt runs alone: the table has what is held after the prompt and one
decode, and at the peak. Then chats run together, once in a pool that never lacks a block, once in a
smaller pool. The last line is one JSON object.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from bench.command import print_result, table
from mlx_paged import Engine
from mlx_paged.attention.causal import limits
from mlx_paged.cli import COUNT, COUNT_OR_NONE, FRACTION, KV_BLOCK_SIZES, Parser
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.runner.model_probe import ModelProfile, probe
from tests.support.models.architectures import VOCAB, build

KIB = 1024
# fmt: off
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"num_hidden_layers": 12, "sliding_window_pattern": 6}),
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 8, "sliding_window_pattern": 4}),
    "exaone4": ("exaone4", {"num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}),
    "gemma3n": (
        "gemma3n",
        {
            "num_hidden_layers": 15, "num_kv_shared_layers": 5,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 3,
            "activation_sparsity_pattern": [0.0] * 15,
        },
    ),
}
# fmt: on
"""By name: a model of `tests.support.models.architectures` and the layers of the family. One layer
of six, two, four, four and five has no window."""


def windowed_model(name: str, window: int) -> nn.Module:
    architecture, layers = MODELS[name]
    return build(architecture, sliding_window=window, max_position_embeddings=16384, **layers)


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCAB, length)]


def held_bytes(engine: Engine) -> int:
    """K/V blocks that sequences hold, in bytes."""
    return engine.manager.allocator.store.blocks_in_use * engine.manager.pool.block_bytes


def one_table_bytes(engine: Engine, token_bytes: int) -> int:
    """The same if every layer kept all tokens: one block table for all layers."""
    size = engine.manager.allocator.block_size
    running = engine.scheduler.running.values()
    tokens = (max(len(request.tokens), request.num_computed) for request in running)
    return sum(ceil_div(count, size) for count in tokens) * size * token_bytes


def engine_held(model: nn.Module, prompt: list[int], chunk: int, size: int) -> tuple[int, int]:
    """Bytes after the prompt and one decode, and at the peak."""
    engine = Engine(model, block_size=size, max_kv_tokens=2 * len(prompt), prefill_chunk=chunk)
    engine.add_request(prompt, max_tokens=8)
    num_tokens = held = peak = 0
    while num_tokens < 2:
        num_tokens += len(engine.step())
        held = held_bytes(engine)
        peak = max(peak, held)
    return held, peak


def mlx_lm_held(model: nn.Module, prompt: list[int], chunk: int) -> tuple[int, int]:
    """The same of mlx-lm's own caches, filled as `generate_step` does."""
    caches = make_prompt_cache(model)
    starts = range(0, len(prompt) - 1, chunk)
    chunks = [prompt[start : min(start + chunk, len(prompt) - 1)] for start in starts]
    held = peak = 0
    for tokens in (*chunks, prompt[-1:], [0]):
        model(mx.array([tokens]), cache=caches)
        mx.eval([cache.state for cache in caches])
        held = sum(cache.nbytes for cache in caches)
        peak = max(peak, held)
    return held, peak


def layer_bytes(profile: ModelProfile) -> tuple[int, int]:
    """Bytes of a token in all layers, and in those with a window."""
    layers = zip(profile.shapes, limits(profile.sees), strict=True)
    pairs = [(shape.token_bytes, window) for shape, window in layers if shape is not None]
    return sum(b for b, _ in pairs), sum(b for b, window in pairs if window)


def compare(model: nn.Module, num_tokens: int, chunk: int, size: int) -> dict[str, Any]:
    """What one prompt holds in the engine and in mlx-lm's caches.

    Allowed are mlx-lm's bytes and a block in every layer. At the peak layers with a window may hold
    two more chunks: the one that is scheduled and the one that is computed.
    """
    prompt = random_tokens(np.random.default_rng(0), num_tokens)
    everywhere, windowed = layer_bytes(probe(model))
    held, peak = engine_held(model, prompt, chunk, size)
    own_held, own_peak = mlx_lm_held(model, prompt, chunk)
    limit = own_held + size * everywhere
    return {
        "held": held, "mlx_lm_held": own_held, "held_ok": held <= limit,
        "peak": peak, "mlx_lm_peak": own_peak, "peak_ok": peak <= limit + 2 * chunk * windowed,
    }  # fmt: skip


def chats(count: int) -> list[tuple[list[int], int]]:
    """Prompts of 50 to 300 tokens, and how many tokens of output follow: 200 to 500."""
    rng = np.random.default_rng(1)
    sizes = rng.integers((50, 200), (301, 501), (count, 2))
    return [(random_tokens(rng, prompt), output) for prompt, output in sizes.tolist()]


def serve(
    model: nn.Module, trace: Sequence[tuple[list[int], int]], size: int, memory: int | None
) -> dict[str, int]:
    """All chats at once, in a pool of `memory` bytes or in one that never lacks a block."""
    tokens = sum(len(prompt) + output + size for prompt, output in trace)
    pool = {"max_kv_tokens": 2 * tokens} if memory is None else {"kv_memory": memory}
    sizes: dict[str, Any] = {"block_size": size, "max_running": len(trace), **pool}
    engine = Engine(model, prefix_cache=False, **sizes)
    for prompt, output in trace:
        engine.add_request(prompt, max_tokens=output)
    everywhere, _ = layer_bytes(probe(model))
    held = one_table = 0
    while engine.has_work:
        engine.step()
        held = max(held, held_bytes(engine))
        one_table = max(one_table, one_table_bytes(engine, everywhere))
    return {
        "one_table_bytes": one_table, "peak_bytes": held,
        "preemptions": engine.stats.preemptions, "peak_running": engine.stats.peak_running,
        "tokens_computed": engine.stats.prompt_tokens + engine.stats.decode_tokens,
    }  # fmt: skip


def held_table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["held, KiB", "mlx-lm", "ratio", "", "peak, KiB", "mlx-lm", "ratio", ""]
    cells = [["model", "window", "tokens", "chunk", *heads]]
    for row in rows:
        line = [str(row[key]) for key in ("model", "window", "prompt_tokens", "chunk")]
        for key in ("held", "peak"):
            ours, theirs = row[key], row[f"mlx_lm_{key}"]
            line += [f"{ours / KIB:.0f}", f"{theirs / KIB:.0f}", f"{ours / theirs:.2f}"]
            line.append("ok" if row[f"{key}_ok"] else "too much")
        cells.append(line)
    return table(cells)


def served_text(result: dict[str, Any]) -> str:
    roomy, tight = result["roomy"], result["tight"]
    computed = tight["tokens_computed"] / roomy["tokens_computed"]
    return (
        f"\n{result['chats']} chats, gemma3 with windows of {result['windows'][0]} tokens. One"
        f" block table for all layers needs {roomy['one_table_bytes']} bytes.\nWithout a limit the"
        f" engine holds {roomy['peak_bytes']} bytes and runs {roomy['peak_running']} chats.\nIn a"
        f" pool of {result['pool_bytes']} bytes it runs {tight['peak_running']} chats, preempts"
        f" {tight['preemptions']} times and computes {computed:.2f} times the tokens."
    )


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="scripts.windowed_memory", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    add("--windows", nargs="+", type=COUNT, default=[64, 256], help="tokens that a layer sees")
    add("--prompt-tokens", nargs="+", type=COUNT, default=[1000, 4000, 8000])
    add("--chunks", nargs="+", type=COUNT, default=[64, 512], help="prefill chunks")
    sizes = KV_BLOCK_SIZES
    add("--block-size", type=int, choices=sizes, default=16, help="tokens in a KV block")
    add("--chats", type=COUNT_OR_NONE, default=40, help="requests of the served trace")
    add("--pool", type=FRACTION, default=0.4, help="pool, as part of what one block table needs")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    cases = [*product(args.models, args.windows, args.prompt_tokens, args.chunks)]
    for name, window, num_tokens, chunk in tqdm(cases, unit="case", disable=None):
        case = {"model": name, "window": window, "prompt_tokens": num_tokens, "chunk": chunk}
        model = windowed_model(name, window)
        rows.append(case | compare(model, num_tokens, chunk, args.block_size))
    result = {**vars(args), "rows": rows}
    print(held_table(rows))
    if args.chats:
        model, trace = windowed_model("gemma3", args.windows[0]), chats(args.chats)
        roomy = serve(model, trace, args.block_size, None)
        pool = int(args.pool * roomy["one_table_bytes"])
        tight = serve(model, trace, args.block_size, pool)
        result |= {"pool_bytes": pool, "roomy": roomy, "tight": tight}
        print(served_text(result))
    print_result("windowed_memory", result)


if __name__ == "__main__":
    main()
