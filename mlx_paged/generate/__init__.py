"""python -m mlx_paged.generate: text for many prompts at once."""
