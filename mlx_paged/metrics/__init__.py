"""What steps cost. Knows no mlx."""
