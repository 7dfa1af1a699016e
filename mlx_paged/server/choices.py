"""One choice of an answer: splits its text into content, reasoning and tool calls."""

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
    """The part of a choice that some tokens add."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # in the API's form
    logprobs: list[Logprob] = field(default_factory=list)  # one per token if they are wanted

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.logprobs)

    def __iadd__(self, other: "Delta") -> "Delta":
        self.text += other.text
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls
        self.logprobs += other.logprobs
        return self


class CompletionChoice:
    """Collects the tokens of one completion.

    Args:
        index: position among the choices of the answer.
        machine: finds reasoning and tool calls in the text.
        state: state of the machine after the prompt.
        tools: parses the text of tool calls.
        describe: makes the log-probability entry of a token; None if no entries are wanted.
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
        self.completion: Completion | None = None  # None until the last token
        self._state = machine.make_state(state)
        self._tools = tools
        self._describe = describe
        self._tool_text = ""
        self._made_calls = False
        self._offset = 0  # characters before the next token of text_logprobs

    @property
    def finish_reason(self) -> str | None:
        """The API's name of the reason; None while the choice is running."""
        if self.completion is None:
            return None
        reason = str(self.completion.finish_reason)
        return "tool_calls" if reason == "stop" and self._made_calls else reason

    def add(self, output: TokenOutput) -> Delta:
        """Add a token. Returns the text and the tool calls that are complete now."""
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
        """The entries in the form for text completions, with mlx-lm's "content" beside it.

        Text offsets continue from call to call, so entries must come in their order.
        """
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
