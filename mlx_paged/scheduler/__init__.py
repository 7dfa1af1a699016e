"""Which tokens the next step computes. Knows no mlx."""
