"""pion-vllm-mlx without its server: kept chunks, layouts, rows, arrays of caches and back."""

import mlx.core as mx
from common import MODEL, PROMPTS, arrays, attempt, show
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from pion_vllm_mlx import prefix_store, prompt_cache
from pion_vllm_mlx._compat import set_slot_arrays, slot_arrays
from pion_vllm_mlx.hybrid_retrieval import HybridRetrievalCache

model, tokenizer = load(str(MODEL))
tokens = tokenizer.encode(PROMPTS[0] + PROMPTS[2])
suffix = tokenizer.encode("\n    return ")


def filled() -> list[object]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    return cache


def continued(cache: list[object]) -> list[int]:
    steps = generate_step(mx.array(suffix), model, max_tokens=16, prompt_cache=cache)
    return [token for token, _ in steps]


def prepared() -> list[object]:
    chunks = HybridRetrievalCache(model)
    chunks.ingest("one", tokens)
    return [continued(chunks.prepare("one", suffix)[0]) for _ in range(2)]


def through_arrays() -> list[object]:
    """What PionPromptCache sends to its server, and the caches that it makes of the answer."""
    pion = prompt_cache.PionPromptCache.__new__(prompt_cache.PionPromptCache)
    pion.model, pion.layout = model, prompt_cache._layout_from(model)
    sent = pion._cache_to_arrays(filled(), len(tokens))
    made = pion._arrays_to_cache(sent, len(tokens))
    flat = pion._kv_to_flat(filled()[0], len(tokens))
    return [[[k.tolist(), v.tolist()] for k, v in sent], continued(made), flat[2:]]


def exported() -> list[int]:
    """The state of a fresh cache from the arrays of a file, as after V.EXPORT."""
    cache = make_prompt_cache(model)
    for new, (keys, values) in zip(cache, arrays(filled()), strict=True):
        new.state = (keys, values)
    return continued(cache)


def slots() -> list[object]:
    cache = make_prompt_cache(model)
    for new, old in zip(cache, filled(), strict=True):
        set_slot_arrays(new, slot_arrays(old)[:2], offset=len(tokens))
    return [[c.offset for c in cache], continued(cache)]


attempt("chunks", prepared)
attempt("chunk arrays", lambda: HybridRetrievalCache(model)._encode_to_mlx_kv(tokens))
attempt("classes", lambda: prompt_cache.PionPromptCache._classify_cache(filled()))
attempt("layout", lambda: str(prefix_store.layout_of(filled())))
rows = lambda c: prefix_store._rows(c.keys, 3, 9, 64, mx.float32).tolist()  # noqa: E731
attempt("rows", lambda: [rows(c) for c in filled()])
attempt("through arrays", through_arrays)
attempt("exported", exported)
attempt("slots", slots)
show("offset", [c.offset for c in filled()])
