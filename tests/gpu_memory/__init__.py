"""A model of what MLX maps, keeps and uses again of a GPU's memory."""
