"""One step on an mlx-lm model."""
