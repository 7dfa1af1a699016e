"""mlx-lm's BatchGenerator on the engine."""
