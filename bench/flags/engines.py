"""Names of the engines that the serving bench compares. Knows no mlx."""

STATIC = "_static"  # ending of the name of an engine that runs batch after batch
VARIANTS = ("mlx_paged_ngram", "mlx_paged_draft", "mlx_paged_useless", "mlx_paged_disk")
"""mlx_paged with drafts, or with K/V on a disk, too."""

LLAMA_CPP = {
    "llama_cpp": {"is_flash": True, "is_half": False},
    "llama_cpp_f16": {"is_flash": True, "is_half": True},
    "llama_cpp_no_flash": {"is_flash": False, "is_half": False},
    "llama_cpp_gguf": {"is_flash": True, "is_half": True},
}
"""How llama.cpp attends, by the engine's name: arguments of its context."""

ENGINES = (
    *("mlx_paged", "mlx_lm", "mlx_lm_static", "sequential", "mlx_paged_static", *VARIANTS),
    *(name + ending for name in LLAMA_CPP for ending in ("", STATIC)),
)
DEFAULT = ENGINES[:4]

APIS = {"completions": "completions", "chat": "chat/completions"}
"""Paths of a server by name."""
