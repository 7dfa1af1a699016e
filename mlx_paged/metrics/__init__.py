"""The cost of steps. Does not import mlx."""
