"""In which order a GPU would run launches: MLX's books of its Metal encoder, without a GPU."""
