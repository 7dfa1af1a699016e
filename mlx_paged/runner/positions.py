"""How many tokens a model has positions for, as its configuration says."""

from collections.abc import Mapping
from typing import Any

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
"""Names that configurations have for the number of positions."""


def positions_of(model: Any) -> int | None:
    """Positions of a model of mlx-lm; None: no limit is known."""
    config = getattr(model, "args", None)
    return positions(vars(config)) if hasattr(config, "__dict__") else None


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions the rotary embedding or the table of a model has; None: no limit."""
    text = config.get("text_config")
    config = vars(text) if hasattr(text, "__dict__") else text or config
    positions: int | None = next((config[name] for name in POSITIONS if config.get(name)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return positions
    kind = scaling.get("rope_type", scaling.get("type"))
    if positions is None or kind not in ("linear", "dynamic", "yarn"):
        return positions
    trained = scaling.get("original_max_position_embeddings") or positions
    return max(positions, int((scaling.get("factor") or 1) * trained))
