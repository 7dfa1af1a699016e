"""How models write thoughts and tool calls: a file for each family. Knows no mlx."""
