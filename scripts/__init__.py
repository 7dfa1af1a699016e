"""Programs for those who work on mlx_paged."""
