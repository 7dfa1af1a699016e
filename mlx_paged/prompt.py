"""A prompt: its tokens, and the images that some of the tokens stand for. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, overload


class Images(Protocol):
    """The images of a prompt; ``ImageSpans`` of ``vision/image_spans.py`` implements it."""

    @property
    def keys(self) -> list[int]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(Sequence[int]):
    """The token ids of a prompt, for any call that takes a prompt.

    Attributes:
        tokens: the ids, those that stand for images included.
        image_spans: the images, and which tokens stand for them; None: no images.
    """

    tokens: list[int]
    image_spans: Images | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is nothing but its tokens."""
        return self.image_spans is None

    @property
    def keys(self) -> list[int]:
        """What K/V depends on: the tokens; instead of a token of an image, an id that depends on
        what the image shows."""
        return self.tokens if self.image_spans is None else self.image_spans.keys

    @property
    def nbytes(self) -> int:
        """Bytes of the images."""
        return 0 if self.image_spans is None else self.image_spans.nbytes

    def with_tokens(self, tokens: list[int]) -> "Prompt":
        """The same images with the tokens of a prompt that goes on after this one."""
        return Prompt(tokens, self.image_spans)

    def __eq__(self, other: object) -> bool:
        """Whether the tokens are those of another sequence; of a prompt also the images."""
        if isinstance(other, Prompt):
            return self.tokens == other.tokens and self.image_spans is other.image_spans
        return isinstance(other, Sequence) and self.tokens == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tokens[index]
