"""Images in the messages of a request. Imports no mlx."""

from typing import Any

from mlx_paged.vision.images import is_image, of_data_url, parts_of

Part = dict[str, Any]

LEFT_OUT = "[An image is left out: results of tools are shown to the model as text.]"


def image_part(part: Part, name: str) -> Part:
    """The part as chat templates know it, with the bytes of `image_url`, a data URL. Raises
    ValueError, which has the part's name, for another URL."""
    if isinstance(part.get("bytes"), bytes):  # no JSON has these
        return part
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    return {"type": "image", "bytes": of_data_url(url, name)}


def as_data_url(block: Part) -> Part:
    """An image block of Anthropic's API as OpenAI's part."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def told(content: Any) -> Any:
    """The content of a tool's result with a sentence in the place of each image."""
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": LEFT_OUT} if is_image(part) else part for part in content]


def joined(first: Any, second: Any) -> Any:
    """Two contents as one, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*parts_of(first), {"type": "text", "text": "\n\n"}, *parts_of(second)]


def taken(messages: list[Part]) -> list[bytes]:
    """The images of messages in their order; the messages keep only their places."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return [part.pop("bytes") for parts in contents for part in parts if "bytes" in part]
