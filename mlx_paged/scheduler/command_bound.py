"""How long one command buffer of a GPU takes at most, by estimate. Knows no mlx."""

from dataclasses import dataclass

from mlx_paged.scheduler.step import StepWork

RATE = 1.5e12
"""Floating-point operations a second of an M1, the slowest GPU, in products and attention."""

MOST_SECONDS = 1.0
"""Estimated seconds of a command buffer at most. macOS ends commands that take several seconds."""


@dataclass(frozen=True, slots=True)
class CommandBound:
    """What the command buffers of a step compute, from the sizes of a model's layers.

    MLX ends a command buffer after the op with which it has bound more than `buffer` elements. So
    it has at most as many layers as these elements allow, one call of attention more, whose
    elements are not counted here, and one product.

    Attributes:
        layers: of the model.
        weights: that a layer multiplies a token with.
        largest: the same of its largest product.
        pair: operations of a layer's attention for a query and a key, in all heads.
        stored: elements of a layer's weights as they are stored, of which a step binds all.
        widths: elements of a token that the products of a layer return.
    """

    layers: int
    weights: float
    largest: float
    pair: float
    stored: float
    widths: float
    buffer: int

    def seconds(self, work: StepWork) -> float:
        """Seconds of the longest command buffer of a step."""
        tokens = work.decode_rows + work.chunk_tokens
        attention = self.pair * (work.decode_context + work.chunk_context)
        layer = 2 * self.weights * tokens + attention
        bound = max(1.0, self.stored + self.widths * tokens)
        longest = layer * self.buffer / bound + attention + 2 * self.largest * tokens
        return min(self.layers * layer, longest) / RATE

    def chunk_within(self, work: StepWork, start: int, wanted: int, least: int) -> int:
        """Prompt tokens from position `start` on, up to `wanted`, with which a step of this `work`
        stays within :data:`MOST_SECONDS`; `least` of them even if it does not."""
        low, high = min(least, wanted), wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(work + StepWork.chunk(start, middle)) <= MOST_SECONDS:
                low = middle
            else:
                high = middle - 1
        return low
