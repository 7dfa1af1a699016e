"""vllm-mlx: its prefix caches, files of them, its server without and with continuous batching."""

from common import MODEL
from prefix_caches import block_caches, managers, memory_caches, served
from vllm_mlx import memory_cache, paged_cache, prefix_cache

memory_caches(memory_cache, {"max_memory_mb": 64, "min_prefix_tokens": 1}, copies=True)
managers(prefix_cache)
block_caches(prefix_cache, paged_cache)
serve = ("vllm-mlx", "serve", MODEL, "--served-model-name", "demo", "--host", "127.0.0.1")
served("server", *serve)
served("batching server", *serve, "--continuous-batching")
