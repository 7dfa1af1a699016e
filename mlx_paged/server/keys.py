"""API keys of clients: where they come from, and whose a given one is. Imports no mlx."""

import hmac
import os
import re
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

API_KEY_VARIABLE = "MLX_PAGED_API_KEY"
ADMIN = "admin"
"""The name of the key of --admin-key."""

NAMED = re.compile(r"([A-Za-z][\w.-]{0,63})=(.*[^=].*)", re.ASCII)
"""A key with a name; base64 ends in signs of equality, and has no name."""

Keys = dict[str, str]
"""Keys by the names that the log shows; one key may have no name."""


def of_arguments(args: Namespace) -> Keys:
    """The keys of each --api-key, of the variable if neither flag is given, and of --api-key-file.
    Raises ValueError, which names the flag or the variable, if a key or the file is wrong."""
    flag, given, path = "--api-key", args.api_key or [], args.api_key_file
    if not given and path is None and API_KEY_VARIABLE in os.environ:
        flag, given = API_KEY_VARIABLE, [os.environ[API_KEY_VARIABLE]]
    keys: Keys = {}
    for text in given:
        name, key = named.groups() if (named := NAMED.fullmatch(text)) else ("", text)
        if name in keys:
            raise ValueError(f"{flag}: expected several keys as NAME=KEY, with different names")
        keys[name] = _checked(key, flag)
    if path is not None:
        keys = _joined(keys, _of_file(path), "--api-key-file")
    if len({*keys.values()}) < len(keys):
        flag = "--api-key" if path is None else "--api-key-file"
        raise ValueError(f"{flag}: expected a different key for each name")
    return keys


def with_admin(args: Namespace, keys: Keys) -> Keys:
    """The keys, and that of --admin-key, which opens what they open. Raises ValueError, which names
    the flag, if it is wrong or no key of its own."""
    if args.admin_key is None:
        return keys
    key = _checked(args.admin_key, "--admin-key")
    if key in keys.values():
        raise ValueError("--admin-key: expected another key than those of clients")
    return _joined(keys, {ADMIN: key}, "--admin-key")


def _joined(keys: Keys, others: Keys, flag: str) -> Keys:
    """All keys. Raises ValueError, which names the flag, if two have one name."""
    for name in keys.keys() & others.keys():
        raise ValueError(f"{flag}: expected no other key with the name {name}")
    return keys | others


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
