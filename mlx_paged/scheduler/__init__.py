"""Which tokens the next step computes. Does not import mlx."""
