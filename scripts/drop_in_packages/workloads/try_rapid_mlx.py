"""rapid-mlx: its prefix caches, files of them, its server with prompts of one beginning."""

from common import MODEL
from prefix_caches import block_caches, managers, memory_caches, served
from rapid_mlx import memory_cache, paged_cache, prefix_cache

memory_caches(memory_cache, {"max_memory_mb": 64}, copies=False)
managers(prefix_cache)
block_caches(prefix_cache, paged_cache)
served("server", "rapid-mlx", "serve", MODEL, "--served-model-name", "demo", "--host", "127.0.0.1")
