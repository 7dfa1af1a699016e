"""The names of control tokens in the texts of a chat, which a chat template does not write.

Before a rendering a mark, one character that the chat does not have, divides each such name. So no
template finds or makes the name of a control token in a text. After the rendering the marks are
taken out, and :class:`Rendered` keeps where they were.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

SPARE = range(0xF5A3C, 0xFFFFE)
"""Characters for private use, which no vocabulary has."""

FORMS = re.compile(
    "|".join(
        [
            f"[{chr(SPARE[0])}-{chr(SPARE[-1])}]",
            r"\\udb[0-9a-f]{2}\\ud[c-f][0-9a-f]{2}",
            r"\\U000f[0-9a-f]{4}",
        ]
    )
)
"""The forms of these characters, as :func:`_forms` makes them."""
LONGEST_FORM = 12
PIECE = 1 << 16  # characters of a text

BRACKETS = re.compile(r"[<>\[\]{}|\uff5c]")
"""Names of control tokens have one of these characters."""

BARRED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Names that only control tokens have."""

OWN_MARKS = ("think_start", "think_end", "tool_call_start", "tool_call_end")
"""Attributes of mlx-lm's tokenizers with names that models write."""


class Rendered(str):
    """The text of a chat.

    Attributes:
        cuts: positions inside the names of control tokens that messages, tools and results have.
            These names are plain text.
    """

    cuts: tuple[int, ...]

    def __new__(cls, text: str, cuts: Iterable[int] = ()) -> "Rendered":
        made = super().__new__(cls, text)
        made.cuts = tuple(cuts)
        return made


def part(text: str, start: int, end: int | None = None) -> Rendered:
    """A part of a text, with its cuts."""
    piece = text[start:end]
    cuts = (at - start for at in getattr(text, "cuts", ()))
    return Rendered(piece, [at for at in cuts if 0 < at < len(piece)])


class Names(NamedTuple):
    """Names of control tokens.

    Attributes:
        all: the names.
        found: matches one of them, the longest possible one.
        begun: matches the beginning of one up to its first character that is not white space.
        joined: all names, with "\\0" around each.
        firsts: the first characters of the names.
        lasts: the last characters of the names.
        longest: characters of the longest one.
    """

    all: frozenset[str]
    found: re.Pattern[str]
    begun: re.Pattern[str]
    joined: str
    firsts: frozenset[str]
    lasts: frozenset[str]
    longest: int


def _partner(name: str) -> str:
    """The start tag that belongs to an end tag, or the end tag that belongs to a start tag."""
    return f"<{name[2:]}" if name.startswith("</") else f"</{name[1:]}"


def _either(names: Sequence[str]) -> str:
    """The pattern of any of the names, and of the longest one where several match. What names begin
    with in common is in the pattern once: tokenizers can have thousands of names."""
    if not names:
        return "(?!)"
    shared = commonprefix(names)  # noqa: RUF071, of characters
    rests = sorted(name[len(shared) :] for name in names)
    longer = [rest for rest in rests if rest]
    if not longer:
        return re.escape(shared)
    groups = (_either([*group]) for _, group in groupby(longer, itemgetter(0)))
    return f"{re.escape(shared)}(?:{'|'.join(groups)}){'?' if len(longer) < len(rests) else ''}"


@lru_cache(maxsize=16)
def _names(names: frozenset[str]) -> Names:
    either = _either(sorted(names))
    return Names(
        names,
        re.compile(either),
        re.compile(rf"(?=(?:{either}))(\s*\S)"),
        "\0".join(["", *sorted(names), ""]),
        frozenset(name[0] for name in names),
        frozenset(name[-1] for name in names),
        max(map(len, names), default=1),
    )


_NAMES: "WeakKeyDictionary[Any, tuple[Any, Names]]" = WeakKeyDictionary()


def names_of(tokenizer: Any) -> Names:
    """The names of control tokens: special ones, those that the chat template or the model writes,
    and those between bars, as ``<|name|>``."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        return _names(frozenset())
    template = getattr(tokenizer, "chat_template", None)
    known = _NAMES.get(tokenizer)
    if known is None or known[0] != template:
        known = _NAMES[tokenizer] = template, _found(tokenizer, template)
    return known[1]


def _found(tokenizer: Any, template: Any) -> Names:
    written = template.values() if isinstance(template, Mapping) else [template or ""]
    own = {getattr(tokenizer, name, None) for name in OWN_MARKS}
    found = set[str]()
    for token in tokenizer.added_tokens_decoder.values():
        name = token.content
        if len(name) > 1 and not name.isspace():
            is_mark = BRACKETS.search(name) and (
                template is None
                or name in own
                or BARRED.fullmatch(name)
                or any(name in str(text) or _partner(name) in str(text) for text in written)
            )
            if token.special or is_mark:
                found.add(name)
    return _names(frozenset(found))


def spare(texts: Sequence[str]) -> str:
    """A character that no text has, in none of its forms. Raises ValueError if there is none."""
    first = chr(SPARE[0])
    if not any(form in text for form in _forms(first) for text in texts):
        return first
    used = set[str]()  # one pass over the texts, and not one for each character
    for text in texts:
        for start in range(0, len(text), PIECE):  # other threads run between two
            used.update(FORMS.findall(text, start, start + PIECE + LONGEST_FORM))
    for each in map(chr, SPARE):
        if used.isdisjoint(_forms(each)):
            return each
    raise ValueError("the chat has all characters for private use: expected one to be free")


def _forms(character: str) -> tuple[str, str, str]:
    """A character as it is, in JSON of ASCII characters, and in a literal of Python, which a
    template writes for an object."""
    return character, json.dumps(character)[1:-1], repr(character)[1:-1]


class Divider:
    """Divides names of control tokens in the texts of one chat.

    Args:
        tokenizer: of the model.
        values: the messages, and the arguments of the template.
    """

    def __init__(self, tokenizer: Any, values: Sequence[Any]) -> None:
        self.names = names_of(tokenizer)
        self.mark = spare(list(_texts(values)))
        self._known: dict[str, str] = {}
        start, end = (getattr(tokenizer, f"think_{each}", None) for each in ("start", "end"))
        self._thought = (start, end) if start and end else None

    def messages(self, messages: Sequence[Any]) -> list[Any]:
        """The messages with divided names. The marks of a thought at the beginning of an
        assistant's content stay, for the template to find."""
        return [self._message(each) for each in messages]

    def value(self, value: Any) -> Any:
        """A value with divided names, in keys of objects too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(each) for key, each in value.items()}
        return [self.value(each) for each in value] if isinstance(value, list | tuple) else value

    def text(self, text: str) -> str:
        """A text with divided names; also where it may become a part of a name."""
        known = self._known.get(text)  # names of fields and roles come again and again
        if known is None:
            divided = self.names.begun.sub(lambda found: found[1] + self.mark, text)
            if not divided.isalnum():
                divided = self._divided_end(self._divided_start(divided))
            known = self._known[text] = divided
        return known

    def _divided_start(self, text: str) -> str:
        """Divide the end of a name that `text` begins with."""
        start = len(text) - len(text.lstrip())
        head = text[start : start + self.names.longest].rstrip()
        ends = (at + 1 for at, x in enumerate(head) if x in self.names.lasts)
        begins = any(
            _is_sign(head[:end]) and f"{head[:end]}\0" in self.names.joined for end in ends
        )
        inside = _is_sign(head) and head in self.names.joined
        if not (begins or inside):
            return text
        return f"{text[: start + 1]}{self.mark}{text[start + 1 :]}"

    def _divided_end(self, text: str) -> str:
        """Divide the beginning of a name that `text` ends with."""
        end = len(text.rstrip())
        tail = text[max(0, end - self.names.longest) : end]
        begins = (at for at, x in enumerate(tail) if x in self.names.firsts)
        if any(_is_sign(tail[at:]) and f"\0{tail[at:]}" in self.names.joined for at in begins):
            return f"{text[:end]}{self.mark}{text[end:]}"
        return text

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return self.value(message)
        made, content = self.value(message), message.get("content")
        if message.get("role") == "assistant" and self._thought and content:
            if isinstance(content, str):
                made["content"] = self._said(content)
            elif isinstance(content[0], Mapping) and isinstance(content[0].get("text"), str):
                made["content"][0]["text"] = self._said(content[0]["text"])
        return made

    def _said(self, text: str) -> str:
        """The text of an assistant, which may begin with a thought."""
        assert self._thought is not None
        start, end = self._thought
        space = text[: len(text) - len(text.lstrip())]
        if not text.startswith(start, len(space)):
            return self.text(text)
        head = space + start
        thought, mark, rest = text[len(head) :].partition(end)
        return f"{head}{self.text(thought)}{mark}{self.text(rest)}"

    def taken_out(self, text: str) -> Rendered:
        """A rendered text without the marks."""
        for form in _forms(self.mark):
            text = text.replace(form, self.mark)
        pieces = text.split(self.mark)
        plain, position, cuts = "".join(pieces), 0, list[int]()
        for piece in pieces[:-1]:
            position += len(piece)
            cuts.append(position)
        return Rendered(plain, _dividing(self.names, plain, cuts))


def all_plain(tokenizer: Any, text: str) -> Rendered:
    """A text in which each name of a control token is plain text."""
    names = names_of(tokenizer)
    return Rendered(text, sorted({found.end() for found in names.begun.finditer(text)}))


def _dividing(names: Names, text: str, cuts: Sequence[int]) -> Iterator[int]:
    """The cuts that are inside a name."""
    last = 0  # the end of the names that are found
    spans = list[tuple[int, int]]()
    for begun in names.begun.finditer(text) if cuts else ():
        found = names.found.match(text, begun.start())
        if found is not None and found.end() > last:
            last = found.end()
            spans.append(found.span())
    starts = [start for start, _ in spans]
    for cut in sorted(set(cuts)):
        at = bisect_right(starts, cut - 1) - 1
        if at >= 0 and cut < spans[at][1]:
            yield cut


def _is_sign(text: str) -> bool:
    """Whether a text has a character that no word has."""
    return any(not (x.isalnum() or x == "_" or x.isspace()) for x in text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def divided(text: str, mark: str) -> str:
    """A text with `mark` at each of its cuts."""
    cuts = getattr(text, "cuts", ())
    bounds: Iterable[tuple[int, int]] = zip((0, *cuts), (*cuts, len(text)), strict=True)
    return mark.join(text[start:end] for start, end in bounds)
