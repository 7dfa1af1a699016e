"""Images in chats, and their files, which are opened within limits. Imports no mlx.

No network is read, and for a request no file.
"""

import base64
import binascii
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 20 << 20
"""Of an image as it is given."""
MAX_PIXELS = 1 << 25
"""Of a prompt's images: 33.5 megapixels. An image's size is read before its pixels."""
MAX_SIDE = (1 << 16) - 1
"""Pixels in a row or a column, as in JPEG. Pillow takes some 20 bytes for each row."""
MAX_IMAGES = 64
"""Of a prompt: processors enlarge small ones."""
MAX_SCANS = 100
"""Of a JPEG. Each one is a pass over all pixels, however few bytes it has."""
SCAN = b"\xff\xda"
EXPECTED = "a PNG, JPEG, WEBP, GIF or BMP image"
KINDS = ("image_url", "image", "input_image")
"""Of parts: of chat completions, of the Messages API, of the Responses API."""
WORD = "xq7w"  # no template has it


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") in KINDS


def has_image(content: Any) -> TypeGuard[list[Any]]:
    """Whether a message's content, text or a list of parts, has an image."""
    return isinstance(content, list) and any(map(is_image, content))


def parts_of(content: Any) -> list[dict[str, Any]]:
    """A message's content as a list of parts."""
    text = "" if content is None else content
    return content if isinstance(content, list) else [{"type": "text", "text": text}]


def knows_only_parts(tokenizer: Any) -> bool:
    """Whether the chat template loses a text that is not a part of a list, as SmolVLM's does."""
    from mlx_paged.chat.rendering import rendered  # it loads transformers

    def shows(content: Any) -> bool:
        try:
            chat = [{"role": "user", "content": content}]
            return WORD in rendered(tokenizer, chat)
        except Exception:  # a template can raise anything
            return False

    return bool(tokenizer.has_chat_template) and not shows(WORD) and shows(parts_of(WORD))


def in_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with all contents as lists of parts."""
    return [m | {"content": parts_of(m["content"])} if m.get("content") else m for m in messages]


def opened(sources: Sequence[Any]) -> "list[Image]":
    """The images of a prompt, upright and with three channels. All are checked before the pixels of
    any of them are decoded.

    Args:
        sources: images of PIL, or bytes of files.

    Raises:
        ValueError: one, which it names, is no image of a known format, broken or too large, or they
            are too many.
    """
    from PIL import ImageOps

    if len(sources) > MAX_IMAGES:
        raise ValueError(f"images: {len(sources)}: expected at most {MAX_IMAGES}")
    found, left = [], MAX_PIXELS
    for i, source in enumerate(sources):
        found.append(_checked(source, f"images[{i}]", left))
        left -= found[-1].width * found[-1].height
    for i, image in enumerate(found):
        try:
            found[i] = ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            message = f"images[{i}]: its pixels cannot be read: expected {EXPECTED}"
            raise ValueError(message) from error
    return found


def _checked(source: Any, name: str, most: int) -> "Image":
    """An image of at most so many pixels, which are not decoded yet."""
    from PIL import Image

    if isinstance(source, bytes | bytearray):
        if len(source) > MAX_BYTES:
            raise ValueError(f"{name}: {len(source)} bytes: expected at most {MAX_BYTES}")
        if source[:2] == b"\xff\xd8" and source.count(SCAN) > MAX_SCANS:
            raise ValueError(f"{name}: expected a JPEG of at most {MAX_SCANS} scans")
        try:
            with warnings.catch_warnings(action="ignore"):  # of many pixels, which are refused here
                source = Image.open(BytesIO(source), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise ValueError(f"{name}: expected at most {MAX_PIXELS} pixels") from error
        except Exception as error:  # a decoder can raise anything
            raise ValueError(f"{name}: cannot be read: expected {EXPECTED}") from error
    if not isinstance(source, Image.Image):
        raise ValueError(f"{name}: {type(source).__name__}: expected {EXPECTED}")
    width, height = source.size
    size = f"{width} x {height} pixels"
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"{name}: {size}: expected sides of at most {MAX_SIDE} pixels")
    if width * height > most:
        raise ValueError(f"{name}: {size}: expected at most {MAX_PIXELS} pixels in all images")
    return source


def of_base64(text: Any, name: str) -> bytes:
    """The bytes of an image in base64. Raises ValueError for anything else, or too many bytes."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected base64")
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise ValueError(f"{name}: expected at most {MAX_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}: expected base64") from error


def of_data_url(url: Any, name: str) -> bytes:
    """The bytes of an image in a data URL. Raises ValueError for any other URL: a request never
    makes this process read the network or a file."""
    kind, comma, content = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (comma and kind.startswith("data:image/") and kind.endswith(";base64")):
        raise ValueError(f"{name}: expected a URL data:image/...;base64,... (no other is fetched)")
    return of_base64(content, name)
