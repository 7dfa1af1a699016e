"""python -m mlx_paged.doctor: checks an installation and its device."""
