"""Muse Spark: an answer is several messages, each to a recipient.

 to=self<|message|>A thought.<|eom|>
<|start|>assistant to=f<|message|><atem:function_calls>
<atem:invoke name="f">
<atem:parameter name="x">value</atem:parameter>
</atem:invoke>
</atem:function_calls><|eom|>
<|start|>assistant to=user<|message|>The answer.<|eot|>
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.channels import Channels, Message
from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Limit
from mlx_paged.formats.grammar import ANY_TEXT, Function
from mlx_paged.formats.invokes import Invokes
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.scan import Scan, at_once
from mlx_paged.formats.schemas import Tools

_RECIPIENT = re.compile(r"\bto=(\S+)")


class AtemTags(Invokes):
    """The tags around calls."""

    tags = "atem:function_calls", "atem:invoke", "atem:parameter"


class MuseSpark(Channels):
    """The headers of the messages."""

    name = "muse_spark"
    final_marks = ("<|eot|>",)

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, None)
        names = ("start", "message", "eom", "eot")
        self.start, self.message, *ends = (marks.code(f"<|{name}|>") for name in names)
        self.ends = tuple(ends)
        self.firsts = "to=", self.start, self.message
        self._tags = AtemTags(marks, None)

    def message_of(self, header: str) -> Message:
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else "user"
        kinds = {"self": Message("thought"), "user": Message("content")}
        kinds["commentary"] = Message("content")
        return kinds.get(recipient, Message("call", recipient))

    def calls_of(self, recipient: str, coded: str, is_whole: bool, tools: Tools) -> list[Call]:
        calls, rest = list[Call](), coded.strip()
        while rest:
            scan = Scan(rest)
            scan.is_ended, scan.is_cut = True, not is_whole
            calls += at_once(self._tags.call(scan, tools))
            rest = scan.text[scan.at :].lstrip()
        if not calls:
            raise NoCall
        return calls

    def limit(self, may_call: bool) -> Limit:
        return Limit(" to=self<|message|>", "<|eom|>", "<|eom|><|start|>assistant to=")

    def around(self, begin: Begin, parts: Sequence[str]) -> list[str]:
        """Content is the text to the user only."""
        if begin == Begin.CONTENT:
            return []
        code, eom = self.marks.lark, self.marks.lark(self.ends[0])
        following = f'{ANY_TEXT} {eom} {code(self.start)} "assistant"'
        final = f"{code(' to=user' + self.message)} content"
        answers = " | ".join(final if part == "content" else part for part in parts)
        first = f"{following} " if begin == Begin.THOUGHT else ""
        thought = f"{code(' to=self' + self.message)} {following}"
        return [f"start: {first}thought* ({answers})", f"thought: {thought}"]

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        first, *rules = self._tags.rules(functions, several) or []
        names = " | ".join(quoted(each.name) for each in functions)
        header = f'" to=" ({names}) {self.marks.lark(self.message)}'
        return [f"calls: {header} tags", first.replace("calls:", "tags:", 1), *rules]
