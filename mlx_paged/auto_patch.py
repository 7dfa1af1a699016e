"""Importing this module patches mlx-lm until :func:`mlx_paged.unpatch_mlx_lm`.

It is for scripts that are to stay as they are but for one line; it comes before what they import
from mlx-lm by name::

    import mlx_paged.auto_patch
"""

from mlx_paged.drop_in.patch import patch_mlx_lm

patch_mlx_lm()
