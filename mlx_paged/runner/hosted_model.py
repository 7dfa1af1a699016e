"""What the runner asks of a model that another package has made."""

from typing import Any

import mlx.nn as nn

from mlx_paged.holdings import Holding
from mlx_paged.runner.batch import Batch


class HostedModel(nn.Module):
    """A model that needs more than tokens and caches. ``vision/host.py`` has the models of mlx-vlm.

    Attributes:
        one_at_a_time: the model computes one sequence in a forward.
    """

    one_at_a_time = False

    @property
    def text_model(self) -> nn.Module:
        """The part that computes tokens."""
        return self

    @property
    def extra_seconds(self) -> float:
        """The seconds that the model has computed outside its forwards."""
        raise NotImplementedError

    @property
    def kept_bytes(self) -> int:
        """What the budget of memory has for what is kept for later batches."""
        return 0

    def forget_kept(self) -> bool:
        """Give up what is only kept for later batches; returns whether there was anything."""
        raise NotImplementedError

    def holdings(self) -> list[Holding]:
        """What is kept for later batches."""
        raise NotImplementedError

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """What a batch needs beside its tokens, as arguments of the model; usually nothing."""
        raise NotImplementedError
