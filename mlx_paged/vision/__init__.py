"""Models of mlx-vlm in the engine: prompts with images, beside prompts of text."""
