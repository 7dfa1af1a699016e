"""Opens images that callers give, within limits. Reads no network and, for a request, no file."""

import base64
import binascii
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 20 << 20
"""Of an image as it is given."""
MAX_PIXELS = 1 << 25
"""Of a prompt's images: 33.5 megapixels. An image's size is read before its pixels."""
MAX_IMAGES = 64
"""Of a prompt: processors enlarge small ones."""
MAX_SCANS = 100
"""Of a JPEG. Each one is a pass over all pixels, however few bytes it has."""
SCAN = b"\xff\xda"
EXPECTED = "a PNG, JPEG, WEBP, GIF or BMP image"


def opened(source: Any, name: str = "image", most: int = MAX_PIXELS) -> "Image":
    """An image with three channels, upright.

    Args:
        source: an image of PIL, or the bytes of a file.
        name: what errors call it.
        most: pixels that it may have.

    Raises:
        ValueError: it is no image of a known format, broken, or too large.
    """
    from PIL import Image, ImageOps

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
    if width * height > most:
        size = f"{width} x {height} pixels"
        raise ValueError(f"{name}: {size}: expected at most {MAX_PIXELS} pixels in all images")
    try:
        upright: Image.Image = ImageOps.exif_transpose(source)
        return upright.convert("RGB")
    except Exception as error:
        raise ValueError(f"{name}: its pixels cannot be read: expected {EXPECTED}") from error


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
