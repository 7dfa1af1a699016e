"""mlx-optiq: n-gram drafts, a view of a cache, quantized caches, snapshots, its server."""

import mlx.core as mx
from common import MODEL, PROMPTS, attempt, free_port, post, server, show
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from optiq.runtime import ngram_spec, streaming_kv_quant
from optiq.runtime.kv.rotating import quantize_cache_layer
from optiq.runtime.mtp.cache_state import rollback_after_verify, snapshot_untrimmable_cache
from optiq.runtime.spec.kv_view import _read_cache_temporal

model, tokenizer = load(str(MODEL))
tokens = mx.array(tokenizer.encode(PROMPTS[2] * 3))


def filled() -> list[object]:
    cache = make_prompt_cache(model)
    mx.eval(model(tokens[None], cache=cache))
    return cache


def drafted(**options: object) -> list[int]:
    steps = ngram_spec.ngram_generate_step(
        tokens, model, max_tokens=32, adaptive=False, persist_costs=False, **options
    )
    return [int(token) for token, _ in steps]


def rolled_back() -> list[int]:
    cache = filled()
    snapshot = snapshot_untrimmable_cache(cache)
    mx.eval(model(tokens[None, :5], cache=cache))
    rollback_after_verify(cache, snapshot, 5)
    return [
        token for token, _ in generate_step(tokens[:1], model, max_tokens=16, prompt_cache=cache)
    ]


def quantized_layers() -> list[object]:
    cache = filled()
    layers = [quantize_cache_layer(c, bits=8, group_size=32) for c in cache]
    return [[part[..., : c.offset, :] for part in (*c.keys, *c.values)] for c in layers]


def streamed_quantization() -> list[object]:
    cache = filled()
    streaming_kv_quant.streaming_maybe_quantize_kv_cache(cache, 8, 32, 8)
    return [type(c).__name__ for c in cache] + [c.offset for c in cache]


attempt("n-gram drafts", drafted)
attempt("n-gram drafts, own cache", lambda: drafted(prompt_cache=make_prompt_cache(model)))
attempt("view", lambda: [_read_cache_temporal(c) for c in filled()])
attempt("rollback", rolled_back)
attempt("quantized layers", quantized_layers)
attempt("streamed quantization", streamed_quantization)
port = free_port()
serve = ("optiq", "serve", "--model", MODEL, "--port", str(port))
try:
    with server("/v1/models", *serve, port=port) as url:
        body = {"max_tokens": 24, "temperature": 0, "prompt": PROMPTS[2] * 2}
        for turn in range(2):
            show(f"server {turn}", post(f"{url}/v1/completions", body))
except RuntimeError as error:
    show("server", {"error": str(error)[:300]})
