"""This process's place under mlx.launch. Knows no mlx."""

import os


def rank() -> int | None:
    """This process's rank under mlx.launch; None without it."""
    return int(text) if (text := os.environ.get("MLX_RANK", "")).isdecimal() else None
