"""What rapid-mlx's and vllm-mlx's prefix caches have in common: store, fetch, trim, save, load."""

from typing import Any

import mlx.core as mx
from common import MODEL, PROMPTS, WORK, arrays, attempt, free_port, post, server, show
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

model, tokenizer = load(str(MODEL))
tokens = tokenizer.encode(PROMPTS[0] + PROMPTS[2] + PROMPTS[1])


def filled(count: int = len(tokens)) -> list[Any]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens[:count]]), cache=cache))
    return cache


def decoded(cache: list[Any], rest: list[int]) -> list[int]:
    steps = generate_step(mx.array(rest or tokens[-1:]), model, max_tokens=12, prompt_cache=cache)
    return [token for token, _ in steps]


def memory_caches(module: Any, options: dict[str, Any], copies: bool) -> None:
    """MemoryAwarePrefixCache and the functions that it uses. `copies`: it says that it keeps copies
    of what it stores, so the caches may go on."""
    attempt("bytes", lambda: module.estimate_kv_cache_memory(module._trim_to_offset(filled())))
    attempt("trim to offset", lambda: arrays(module._trim_to_offset(filled())))
    attempt("trim offset", lambda: [c.offset for c in module._trim_cache_offset(filled(), 7)])

    def quantized() -> list[Any]:
        there = module._quantize_cache(module._trim_to_offset(filled()), 8, 32)
        return [[type(c).__name__ for c in there], arrays(module._dequantize_cache(there))]

    attempt("quantize and back", quantized)
    store = module.MemoryAwarePrefixCache(model, module.MemoryCacheConfig(**options))

    def stored() -> list[Any]:
        live = filled(20)
        kept = store.store(tokens[:20], live)
        if copies:
            mx.eval(model(mx.array([tokens[:4]]), cache=live))
        return [kept, len(store)]

    def fetched(wanted: list[int]) -> list[Any]:
        cache, rest = store.fetch(wanted)
        clone = getattr(store, "clone_for_replay", lambda c: c)
        return [store._last_match_type, len(rest), cache and decoded(clone(cache), rest)]

    attempt("store", stored)
    attempt("fetch, longer", fetched, tokens)
    attempt("fetch, exact", fetched, tokens[:20])
    # rapid-mlx writes to the arrays of a stored entry after these; what follows reads before there.
    attempt("fetch, branch", fetched, [*tokens[:15], *tokens[:6]])
    attempt("fetch, shorter", fetched, tokens[:12])
    attempt("save", store.save_to_disk, str(WORK / "prefixes"))
    store.clear()
    attempt("load", store.load_from_disk, str(WORK / "prefixes"))
    attempt("fetch, loaded", fetched, tokens)


def managers(module: Any) -> None:
    """PrefixCacheManager: whole caches in a trie."""
    manager = module.PrefixCacheManager(model)
    manager.store_cache(tokens[:20], filled(20))

    def fetched(wanted: list[int]) -> list[Any]:
        cache, rest = manager.fetch_cache(wanted)
        return [len(rest), cache and decoded(cache, rest)]

    attempt("manager, longer", fetched, tokens)
    attempt("manager, shorter", fetched, tokens[:12])
    attempt("manager, exact", fetched, tokens[:20])


def block_caches(prefix: Any, paged: Any) -> None:
    """BlockAwarePrefixCache: the states of caches, cut into blocks and put together again."""
    blocks = prefix.BlockAwarePrefixCache(model, paged.PagedCacheManager(8, 64))

    def stored() -> Any:
        live = filled(20)
        data = [
            {"state": c.state, "meta_state": getattr(c, "meta_state", ""), "class_ref": type(c)}
            | {"class_name": type(c).__name__}
            for c in live
        ]
        blocks.store_cache("one", tokens[:20], data)
        table, rest = blocks.fetch_cache("two", tokens)
        cache = blocks.reconstruct_cache(table)
        return [len(rest), cache and decoded(cache, rest)]

    attempt("blocks", stored)


def served(name: str, *argv: Any) -> None:
    """Chats that share their beginning, at the package's own server."""
    port = free_port()
    try:
        with server("/v1/models", *argv, "--port", str(port), port=port) as url:
            body = {"model": "demo", "max_tokens": 16, "temperature": 0}
            for turn in range(3):
                prompt = PROMPTS[2] * (turn + 1)
                answer = post(f"{url}/v1/completions", {**body, "prompt": prompt})
                show(f"{name}, completion {turn}", answer)
            for turn in (1, 2, 1):
                messages = [{"role": "user", "content": "a class " * 8 * turn}]
                answer = post(f"{url}/v1/chat/completions", {**body, "messages": messages})
                show(f"{name}, chat {turn}", answer)
    except RuntimeError as error:
        show(name, {"error": str(error)[-300:]})
