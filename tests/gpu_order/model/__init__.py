"""What MLX's Metal backend orders, as a model, and traces of the engine to judge by it."""
