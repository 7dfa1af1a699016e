"""The arguments of each bench. Knows no mlx, so that help is shown at once."""
