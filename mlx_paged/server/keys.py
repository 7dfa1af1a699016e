"""API keys of clients: where they come from, and whose a given one is. Imports no mlx."""

import hmac
import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

API_KEY_VARIABLE = "MLX_PAGED_API_KEY"

Keys = dict[str, str]
"""Keys by the names that the log shows; the key without a name is that of --api-key."""


def of_arguments(args: Namespace) -> Keys:
    """The keys of --api-key, of the variable if neither flag is given, and of --api-key-file.
    Raises ValueError, which names the flag or the variable, if a key or the file is wrong."""
    flag, path = "--api-key", args.api_key_file
    if args.api_key is None and path is None:
        flag, args.api_key = API_KEY_VARIABLE, os.environ.get(API_KEY_VARIABLE)
    keys = {} if args.api_key is None else {"": _checked(args.api_key, flag)}
    return keys if path is None else keys | _of_file(path)


def name_of(keys: Keys, given: Iterable[str]) -> str | None:
    """The name of the key that is among the given ones, or None. The time that this takes tells
    nothing about the keys."""
    found = None
    texts = [text.encode() for text in given]
    for name, key in keys.items():
        for text in texts:
            if hmac.compare_digest(text, key.encode()):
                found = name
    return found


def _of_file(path: str) -> Keys:
    """Keys of a file: a line has a key, or a name and a key. A key without a name is called by the
    number of its line."""
    flag = "--api-key-file"
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: expected a text file, got {path!r}: {error}") from None
    keys: Keys = {}
    for number, line in enumerate(lines, 1):
        words, place = line.split(), f"{flag}: line {number}"
        if not words or line.startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"{place}: expected a key, or a name and a key, got more words")
        name = words[0] if len(words) == 2 else f"line {number}"
        if not name.isprintable() or name in keys:
            raise ValueError(
                f"{place}: expected a name that is printable and that no other key has"
            )
        keys[name] = _checked(words[-1], place)
    if not keys:
        raise ValueError(f"{flag}: expected at least one key in {path!r}")
    return keys


def _checked(key: str, place: str) -> str:
    """The key, which is never shown: a log may hold the message."""
    is_good = key.isascii() and key.isprintable() and key and " " not in key
    if not is_good:
        problem = "an empty one" if not key.strip() else "other characters"
        raise ValueError(
            f"{place}: expected a key of printable ASCII without spaces, got {problem}"
        )
    return key
