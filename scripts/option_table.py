"""Writes the options of an engine into docs/engine.md and into the docstring of ``Engine``.

python -m scripts.option_table

The texts are those of ``mlx_paged/options.py``; the order is that of the keywords of ``Engine``.
"""

import re
import textwrap
from inspect import signature
from pathlib import Path

from mlx_paged import Engine
from mlx_paged.option_kinds import OptionFlag
from mlx_paged.options import DEFAULTS, OPTIONS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engine.md"
MODULE = ROOT / "mlx_paged" / "engine" / "engine.py"
HEAD = "| option | default | flag | meaning |\n|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)+")
ARGUMENTS = re.compile(
    r"(?<=            ids and outputs have no text\.\n).*?(?=\n    Raises:\n)", re.S
)
"""The options in the docstring: what is between the tokenizer and the errors."""


def names() -> list[str]:
    """The options in the order of the keywords."""
    return [name for name in signature(Engine).parameters if name in OPTIONS]


def table() -> str:
    """The table of the document."""
    return HEAD + "".join(_row(name) for name in names())


def arguments() -> str:
    """The options as a part of the docstring."""
    texts = (f"{name}: {OPTIONS[name].text}" for name in names())
    return "".join(
        f"{line}\n"
        for text in texts
        for line in textwrap.wrap(
            text,
            100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _row(name: str) -> str:
    option, default = OPTIONS[name], DEFAULTS[name]
    text = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", option.text)
    text = re.sub(r":meth:`(\w+)`", r"`Engine.\1()`", text)
    text = re.sub(r":class:`(\w+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")
    shown = f'"{default}"' if isinstance(default, str) else repr(default)
    return f"| `{name}` | `{shown}` | {_flags(option.flag)} | {text[0].upper()}{text[1:]} |\n"


def _flags(flag: OptionFlag | None) -> str:
    return "" if flag is None else ", ".join(f"`{name}`" for name in flag.names.split())


def main() -> None:
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(), count=1))
    MODULE.write_text(ARGUMENTS.sub(lambda _: arguments(), MODULE.read_text(), count=1))


if __name__ == "__main__":
    main()
