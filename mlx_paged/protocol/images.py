"""Images in the messages of a request. Imports no mlx."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from mlx_paged.vision.images import has_image, is_image, of_data_url, parts_of

Part = dict[str, Any]

LEFT_OUT = "[An image is left out: the model is shown the texts of this result.]"


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


def of_result(content: Any) -> Any:
    """The content of a tool's result, with a sentence in the place of each image that cannot be
    read: the client did not choose the image."""
    return [*map(_of_result, content)] if has_image(content) else content


def _of_result(part: Any) -> Any:
    if not is_image(part):
        return part
    try:
        return image_part(as_data_url(part) if "source" in part else part, "content")
    except ValueError:
        return {"type": "text", "text": LEFT_OUT}


def told(messages: list[Part]) -> list[Part]:
    """The messages with a sentence in the place of each image in a tool's result."""
    return [m | {"content": _told(m["content"])} if m["role"] == "tool" else m for m in messages]


def _told(content: Any) -> Any:
    if not has_image(content):
        return content
    return "".join(LEFT_OUT if is_image(part) else part.get("text") or "" for part in content)


def joined(contents: Sequence[Any]) -> Any:
    """Contents of one message or more as one, with an empty line between two of them."""
    if len(contents) == 1:
        return contents[0]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    between = {"type": "text", "text": "\n\n"}
    first, *others = ([between, *parts_of(content)] for content in contents)
    return list(chain(first[1:], *others))


def taken(messages: list[Part]) -> list[bytes]:
    """The images of messages in their order; the messages keep only their places."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return [part.pop("bytes") for parts in contents for part in parts if "bytes" in part]
