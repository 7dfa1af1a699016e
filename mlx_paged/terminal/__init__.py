"""mlx_paged chat: a chat in a terminal."""
