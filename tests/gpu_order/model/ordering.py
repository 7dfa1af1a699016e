"""Which encoders are known to run after which."""

from tests.gpu_order.model.encoder import Touch

EncoderSet = int
"""Encoders as a set of bits, by index."""


class Ordering:
    """The order of encoders, as fences, events and the host make it.

    Attributes:
        done: encoders that are complete before anything that is encoded from now on.
    """

    def __init__(self) -> None:
        self.done: EncoderSet = 0
        self._before: list[EncoderSet] = []  # by encoder

    def new_encoder(self) -> int:
        """The index of another encoder, which runs after all that is done."""
        self._before.append(self.done)
        return len(self._before) - 1

    def closed(self, encoders: EncoderSet) -> EncoderSet:
        """These encoders and all that run before one of them."""
        found, rest = encoders, encoders & ~self.done
        while rest:
            lowest = rest & -rest
            found |= self._before[lowest.bit_length() - 1]
            rest ^= lowest
        return found

    def wait(self, encoder: int, encoders: EncoderSet) -> None:
        """Let an encoder begin when these are complete."""
        self._before[encoder] |= self.closed(encoders)

    def host_waits(self, encoders: EncoderSet) -> None:
        """The host goes on when these are complete."""
        self.done |= self.closed(encoders)

    def is_ordered(self, first: Touch, second: Touch) -> bool:
        """Whether the first access is complete when the second one begins."""
        if first.encoder == second.encoder:
            return first.epoch < second.epoch
        return bool(self._before[second.encoder] >> first.encoder & 1)
