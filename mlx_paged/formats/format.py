"""What a family of models has in its own file: a :class:`Format`.

A new family is a module with one class and, in ``tests/formats``, one table of cases and a renderer
that is written after the documentation of the family. ``registry.py`` lists the class.

- The marks of the family are coded when a format is made, with ``self.marks.code("<mark>")``. What
  parsers read is coded text: a mark that is a token of the model is one character there. So a
  pattern or a literal that is made of coded marks finds nothing that only looks like a mark.
- ``openers`` are the coded texts that begin a call. The parser in ``parser.py`` calls
  :meth:`Format.call` where it finds one.
- ``call`` reads one wrapper, with one or more calls. It is a generator over a :class:`Scan`. Where
  several calls share a wrapper, ``scan.keep`` keeps those that are complete if the rest is none.
  ``scan.json()`` reads JSON and keeps the model's text. The base class in ``tagged.py`` reads plain
  values between tags; ``searched.py`` has the search for their ends.
- ``rules`` is the grammar of calls, for requests in which a tool must be called. A format with tags
  sets ``shape``, and the base class makes its rules.
- ``around`` is the grammar of an answer with a thought before its content or its calls.
- A format of several messages with headers derives from :class:`Channels` in ``channels.py``.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from mlx_paged.formats.grammar import ANY_TEXT, SPACE, Function
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.parser import Begin, Inline, Parser
from mlx_paged.formats.scan import Calls, Scan
from mlx_paged.formats.schemas import Tools
from mlx_paged.formats.thoughts import Thoughts, coded

LEADING = ("system", "developer")
"""Roles of a first turn with instructions."""


class Limit(NamedTuple):
    """How the length of thoughts is limited, as texts.

    Attributes:
        start: begins a thought, at the beginning of an answer.
        end: ends a thought.
        forced: what follows where a thought is too long.
    """

    start: str
    end: str
    forced: str


class Format:
    """How the models of a family write thoughts and calls.

    Args:
        marks: those of the model.
        thoughts: the marks of its thoughts, as text; None if it does not think.

    Attributes:
        name: what ``--tool-format`` calls the format.
        aliases: other names of it: those of mlx-lm's parsers that read it.
        tokens: marks that are tokens of models with this format and of no others.
        final_marks: marks that end an answer.
        openers: coded texts that begin a call.
        silent: coded texts in the content that are marks of the format and no text.
        first_openers: coded texts that begin a call only before other content.
        arguments_are_text: the chat template takes the arguments of a call as JSON in a text.
        tools_need_system: the chat template writes tools only into the turn of the system.
        efforts: what the models call an effort of reasoning that has another name for clients.
    """

    name: str = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    tokens: ClassVar[tuple[str, ...]] = ()
    final_marks: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    first_openers: tuple[str, ...] = ()
    arguments_are_text: bool = False
    tools_need_system: bool = False
    efforts: Mapping[str, str] = MappingProxyType({})

    def __init__(self, marks: Marks, thoughts: Thoughts | None) -> None:
        self.marks = marks
        self.thoughts = thoughts and coded(marks, thoughts)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        """Read a wrapper of calls.

        Raises:
            NoCall: the text is no well-formed call.
        """
        raise NotImplementedError

    def parser(
        self,
        tools: Sequence[Any],
        begin: Begin,
        is_data: bool = False,
        allowed: Collection[str] | None = None,
    ) -> Parser:
        """A parser of one answer.

        Args:
            tools: those of the request, in the form of chat completions; if there are none,
                nothing is a call.
            begin: where the answer begins.
            is_data: the content follows a schema or a grammar.
            allowed: the names that may be called, other calls are text; None: every name.
        """
        calls = self if tools and (self.openers or self.first_openers) else None
        known = Tools(tools, is_data, allowed)
        inline = Inline(self.marks, self.thoughts, calls, known, begin, is_data)
        inline.silent = self.silent
        return inline

    def begin(self, generation_prompt: str, continued: str | None) -> Begin:
        """Where an answer begins.

        Args:
            generation_prompt: the text that the chat template adds after the messages.
            continued: the text of the turn that the answer continues, if it does.
        """
        if self.thoughts is None:
            return Begin.START if not continued else Begin.CONTENT
        said = self.marks.coded_text(generation_prompt if continued is None else continued)
        start, end = self.thoughts
        if continued is not None and not said.lstrip().startswith(start):
            return Begin.CONTENT if said.strip() else Begin.START
        is_open = said.rfind(start.rstrip()) > said.rfind(end)
        if is_open:
            return Begin.THOUGHT
        return Begin.START if continued is None else Begin.CONTENT

    @property
    def thinks(self) -> bool:
        """Whether models of the format can think."""
        return self.thoughts is not None

    def limit(self, may_call: bool) -> Limit | None:
        """How the length of thoughts is limited; None if the model does not think.

        Args:
            may_call: the answer may have calls after the thought.
        """
        if self.thoughts is None:
            return None
        start, end = map(self.marks.plain, self.thoughts)
        return Limit(start, end, end)

    def history(
        self, messages: list[dict[str, Any]], has_tools: bool = False
    ) -> list[dict[str, Any]]:
        """The messages of a chat as the templates of this family take them; `messages` itself is
        not changed.

        Args:
            has_tools: the chat template gets tools beside the messages.
        """
        messages = [*map(_with_text, messages)] if self.arguments_are_text else messages
        if not (has_tools and self.tools_need_system) or messages[0]["role"] in LEADING:
            return messages
        return [{"role": "system", "content": ""}, *messages]

    def declared(self, tools: Sequence[Any]) -> Sequence[Any]:
        """Tools as the templates of this family take them; `tools` itself is not changed."""
        return tools

    def around(self, begin: Begin, parts: Sequence[str]) -> list[str]:
        """Rules of a grammar of whole answers, ``start`` first; none if an answer that begins at
        `begin` is one of the parts and nothing else.

        Args:
            parts: ``content`` or ``calls`` or both, which are other rules.
        """
        answer = " | ".join(parts)
        if begin == Begin.THOUGHT and self.thoughts is not None:
            end = self.thoughts.end
            if self.marks.plain(end) == end:
                thought = f"thought[suffix={quoted(end)}]: {ANY_TEXT}"
            else:
                thought = f"thought: {ANY_TEXT} {self.marks.lark(end)}"
            return [f"start: thought {SPACE} ({answer})", thought]
        return [f"start: {answer}"] if len(parts) > 1 else []

    def rules(self, functions: Sequence[Function], several: bool) -> list[str] | None:
        """Rules of a grammar in llguidance's form of Lark; the rule ``calls`` is one call of a
        function, or `several` of them. None: no grammar of this format is known."""
        return None


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as text."""
    calls = [dict(call) for call in message.get("tool_calls") or []]
    for call in calls:
        inner = dict(call.get("function", call))
        if not isinstance(inner.get("arguments"), str):
            inner["arguments"] = json.dumps(inner.get("arguments", {}), ensure_ascii=False)
        call.update({"function": inner} if "function" in call else inner)
    return message | {"tool_calls": calls} if calls else message
