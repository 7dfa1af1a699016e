"""Models of mlx-vlm in the engine: prompts with images and prompts of text."""
