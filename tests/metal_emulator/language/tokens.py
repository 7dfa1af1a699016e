"""Tokens of preprocessed Metal source. Edits keep every line where it was."""

import re
from dataclasses import dataclass
from typing import NoReturn

ADDRESS_SPACES = frozenset({"device", "constant", "threadgroup", "thread"})

_TOKEN = re.compile(
    r"""
    (?P<space>  (?: [ \t\r\n]+ | ^\#[^\n]*\n )+ )
  | (?P<string> (?: u8 | L )? "(?: \\. | [^"\\] )*" | '(?: \\. | [^'\\] )*' )
  | (?P<name>   [A-Za-z_]\w* )
  | (?P<number> \.?\d (?: [eEpP][+-] | [\w.] )* )
  | (?P<symbol> :: | ->\*? | <<=? | >>= | \.\.\. | \#\# | [-+*/%&|^=!<>]=
              | && | \|\| | \+\+ | -- | . )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_CLOSING = frozenset(_BRACKETS.values())


class TranslationError(Exception):
    """The source uses something that the emulator does not understand."""


@dataclass(slots=True)
class Token:
    """One token and the white space (and line markers) before it."""

    space: str
    text: str
    kind: str  # "string", "name", "number", "symbol", "erased", "inserted" or "end"


class TokenList:
    """The tokens of one source, addressed by index. Erased tokens stay, as empty text."""

    def __init__(self, source: str) -> None:
        self._tokens: list[Token] = []
        space = ""
        for match in _TOKEN.finditer(source):
            kind = match.lastgroup or ""
            if kind == "space":
                space += match.group()
            else:
                self._tokens.append(Token(space, match.group(), kind))
                space = ""
        self._tokens.append(Token(space, "", "end"))  # so that looking ahead finds something
        self._partner = self._match_brackets()

    def __len__(self) -> int:
        return len(self._tokens) - 1  # without the end

    def __getitem__(self, index: int) -> Token:
        return self._tokens[index]

    def text(self) -> str:
        """The source as it is now."""
        return "".join(token.space + token.text for token in self._tokens)

    def words(self, start: int, stop: int) -> list[str]:
        """The texts of the tokens in [start, stop) that are not erased."""
        return [self._tokens[i].text for i in self.present(start, stop)]

    def present(self, start: int, stop: int) -> list[int]:
        """The indices in [start, stop) that are not erased."""
        return [i for i in range(start, stop) if self._tokens[i].kind != "erased"]

    def following(self, index: int) -> int:
        """The first index from `index` on that is not erased."""
        while index < len(self) and self._tokens[index].kind == "erased":
            index += 1
        return min(index, len(self))

    def preceding(self, index: int) -> int:
        """The last index up to `index` that is not erased, or -1."""
        while index >= 0 and self._tokens[index].kind == "erased":
            index -= 1
        return index

    def erase(self, start: int, stop: int) -> None:
        for token in self._tokens[start:stop]:
            token.text, token.kind = "", "erased"

    def replace(self, start: int, stop: int, text: str) -> None:
        """Put `text` where the tokens [start, stop) were."""
        self.erase(start, stop)
        self._tokens[start].text, self._tokens[start].kind = text, "inserted"

    def append(self, index: int, text: str) -> None:
        """Put `text` right behind one token, on its line."""
        self._tokens[index].text += " " + text

    def closing(self, index: int) -> int:
        """The index of the bracket that closes the one at `index`."""
        return self._partner[index]

    def is_open(self, index: int) -> bool:
        token = self._tokens[index]
        return token.kind == "symbol" and token.text in _BRACKETS

    def skip(self, index: int) -> int:
        """The index behind one token, or behind the whole group if it opens one."""
        return self._partner[index] + 1 if self.is_open(index) else index + 1

    def skip_template_arguments(self, index: int) -> int:
        """The index behind the ">" that closes the "<" at `index`."""
        end = self.template_arguments_end(index)
        if end is None:
            self.fail("no end of the template arguments", index)
        return end

    def template_arguments_end(self, index: int) -> int | None:
        """Likewise; None if the "<" is a comparison."""
        depth = 0
        while index < len(self):
            text = self._tokens[index].text
            if self.is_open(index):
                index = self._partner[index]
            elif text == "<" and (depth == 0 or self._is_after_name(index)):
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return index + 1
            elif text in (";", ")", "}"):
                return None
            index += 1
        return None

    def _is_after_name(self, index: int) -> bool:
        return self._tokens[self.preceding(index - 1)].kind == "name"

    def fail(self, message: str, index: int) -> NoReturn:
        around = " ".join(self.words(max(0, index - 12), min(len(self), index + 6)))
        raise TranslationError(f"{self.location(index)}: {message}, near: {around}")

    def location(self, index: int) -> str:
        """The file and line of one token, as the preprocessor's line markers tell."""
        file, line = "<source>", 1
        for token in self._tokens[: index + 1]:
            for part in token.space.splitlines(keepends=True):
                marker = re.match(r'#(?:line)?\s+(\d+)(?:\s+"([^"]*)")?', part)
                if marker:
                    line, file = int(marker[1]), marker[2] or file
                else:
                    line += part.count("\n")
        return f"{file}:{line}"

    def _match_brackets(self) -> dict[int, int]:
        partner: dict[int, int] = {}
        stack: list[int] = []
        for i, token in enumerate(self._tokens):
            if token.kind != "symbol":
                continue
            if token.text in _BRACKETS:
                stack.append(i)
            elif token.text in _CLOSING:
                if not stack or _BRACKETS[self._tokens[stack[-1]].text] != token.text:
                    self.fail(f"unbalanced {token.text}", i)
                partner[i] = stack.pop()
                partner[partner[i]] = i
        if stack:
            self.fail(f"unbalanced {self._tokens[stack[-1]].text}", stack[-1])
        return partner
