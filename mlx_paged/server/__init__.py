"""python -m mlx_paged.server: mlx-lm's HTTP server on the engine."""
