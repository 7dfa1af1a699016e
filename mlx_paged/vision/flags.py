"""The flag of the commands that load models of mlx-vlm. Knows no mlx."""

from mlx_paged.cli import SWITCH, Flag

VISION: Flag = (
    "--vision",
    SWITCH,
    False,
    "",
    "load the model with mlx-vlm, for prompts with images",
)
