"""How models write thoughts and tool calls: a file for each family. Does not import mlx."""
