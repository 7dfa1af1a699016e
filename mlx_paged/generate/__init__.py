"""python -m mlx_paged.generate: generates text for many prompts at once."""
