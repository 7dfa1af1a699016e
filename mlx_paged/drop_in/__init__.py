"""Paged caches under mlx-lm's own functions."""
