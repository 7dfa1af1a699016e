"""One choice of an answer: text, reasoning and tool calls, told apart as the text comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import ToolCallFormatter

from mlx_paged.outputs import Completion, TokenOutput

Logprob = dict[str, Any]


@dataclass(slots=True)
class Delta:
    """What some tokens add to a choice.

    Attributes:
        tool_calls: in the form of the API.
        logprobs: one entry for each token, if asked for.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.logprobs)

    def __iadd__(self, other: "Delta") -> "Delta":
        self.text += other.text
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls
        self.logprobs += other.logprobs
        return self


class CompletionChoice:
    """Takes in the tokens of one completion.

    Args:
        index: among the choices of the answer.
        machine: finds out what is reasoning and what a tool call.
        state: in which the prompt left it.
        tools: makes tool calls of their text.
        describe: makes the entry for a token and its log-probability; None: nobody asks for it.

    Attributes:
        completion: set with the last token.
    """

    def __init__(
        self,
        index: int,
        machine: TextStateMachine,
        state: str,
        tools: ToolCallFormatter,
        describe: Callable[[TokenOutput], Logprob] | None = None,
    ) -> None:
        self.index = index
        self.completion: Completion | None = None
        self._state = machine.make_state(state)
        self._tools = tools
        self._describe = describe
        self._tool_text = ""
        self._made_calls = False
        self._offset = 0  # characters of the tokens told of by text_logprobs

    @property
    def finish_reason(self) -> str | None:
        """In the API's words; None while the choice goes on."""
        if self.completion is None:
            return None
        reason = str(self.completion.finish_reason)
        return "tool_calls" if reason == "stop" and self._made_calls else reason

    def add(self, output: TokenOutput) -> Delta:
        """Take in a token; says what became certain by it."""
        delta = Delta()
        self._state, segments = TextStateMachine.split(self._state, output.text)
        self._read(segments, delta)
        if output.completion is not None:
            self.completion = output.completion
            self._state, rest, state = TextStateMachine.flush(self._state)
            self._read([(state, rest), (None, "")], delta)
        if self._describe is not None and output.token is not None:
            delta.logprobs.append(self._describe(output))
        return delta

    def text_logprobs(self, logprobs: list[Logprob]) -> dict[str, Any]:
        """As the API has them for plain completions, and as mlx-lm does; to be called with all
        entries in their order, since offsets go on from call to call."""
        ends = list(accumulate((len(entry["token"]) for entry in logprobs), initial=self._offset))
        self._offset = ends.pop()
        return {
            "tokens": [entry["token"] for entry in logprobs],
            "token_logprobs": [entry["logprob"] for entry in logprobs],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                for entry in logprobs
            ],
            "text_offset": ends,
            "content": logprobs,
        }

    def _read(self, segments: Sequence[tuple[str | None, str]], delta: Delta) -> None:
        for state, text in segments:
            if state == "tool":
                self._tool_text += text
                continue
            if self._tool_text:
                delta.tool_calls += self._tools([self._tool_text])
                self._tool_text, self._made_calls = "", True
            if state == "reasoning":
                delta.reasoning += text
            else:
                delta.text += text


def chat_logprobs(logprobs: list[Logprob]) -> dict[str, Any]:
    """As the API has them for chats."""
    return {"content": logprobs}
