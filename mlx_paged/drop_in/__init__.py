"""Paged caches for mlx-lm's own functions."""
