"""Tiny random models, and what mlx-lm computes with them."""
