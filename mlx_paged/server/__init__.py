"""python -m mlx_paged.server: an OpenAI-compatible HTTP server on the engine."""
