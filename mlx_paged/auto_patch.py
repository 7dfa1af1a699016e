"""Importing this module patches mlx-lm until :func:`mlx_paged.unpatch_mlx_lm`.

A script that must not change otherwise imports it before it imports names from mlx-lm::

    import mlx_paged.auto_patch
"""

import mlx_paged

mlx_paged.patch_mlx_lm()
