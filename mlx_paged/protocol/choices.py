"""One choice of an answer: its text, its thoughts and its calls of tools, in their order."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from mlx_paged.engine.spelling import Spelling, spelling_of
from mlx_paged.engine.text import StopStrings
from mlx_paged.formats.events import Call, Event, Thought
from mlx_paged.formats.parser import Parser, Whole
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.protocol.deltas import Delta, Placed
from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.model_traits import ModelTraits
from mlx_paged.protocol.prompts import Prompt
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.request import FinishReason

GRAMMAR_FAILED = "[SamplingParams] the grammar "
"""How the engine begins to tell of a limit of llguidance that shows while a text is generated."""

UNLIKELY = -9999.0
"""What OpenAI's API tells as the log-probability of a token that has none."""


@dataclass(slots=True)
class TextOffsets:
    """Where tokens begin in a text. A token's own text need not be there: its bytes may be a part
    of a character, a space may be left out, a special token has none."""

    text: str
    end: int = 0  # of the text of the tokens so far

    def of(self, token_text: str, segment: str) -> int:
        """Where the next token begins, which makes `segment` certain."""
        start = self.end
        found = self.text.find(segment, start, start + len(segment) + 1)
        if found < 0:
            return start
        self.end = found + len(segment)
        is_there = token_text and segment.endswith(token_text)
        return self.end - len(token_text) if is_there else start


class CompletionChoice:
    """Collects the tokens of one completion, which is choice `index` of the answer. The format of
    the model finds thoughts and calls. Stop strings count in the content only."""

    def __init__(self, index: int, model: ModelTraits, fields: Fields, prompt: Prompt) -> None:
        self.index = index
        self.num_tokens = 0  # tokens until the end of the choice
        self.num_thoughts = 0  # those of them that are reasoning
        self.num_cached = 0  # prompt tokens that were found in the prefix cache
        self.is_cut = False  # it has ended before its completion, which is to be aborted
        self.completion: Completion | None = None  # None until the last token
        self._fields = fields
        self._model = model
        self._tokenizer = model.tokenizer
        self._stop = StopStrings(fields["stop"])
        self._one_call = not fields.get("parallel_tool_calls", True)
        self._prompt, self._echo = prompt, prompt.text
        self._parser = self._new_parser()
        self._num_calls = 0
        self._offsets = TextOffsets(prompt.text, len(prompt.text))
        self._placed = Placed()
        self._starts: list[int] = []  # of tokens that _text_logprobs has not told yet

    def _new_parser(self) -> Parser:
        """The parser of the answer; the text of a text completion stays as it is."""
        if "messages" not in self._fields:
            return Whole()
        is_data = bool(self._fields.get("constraint"))
        tools, allowed = self._fields["tools"], self._fields.get("allowed")
        return self._model.format.parser(tools, self._prompt.begin, is_data, allowed)

    @property
    def engine_reason(self) -> str:
        """The name of a :class:`FinishReason`; "abort" if the choice has not ended."""
        if self.completion is None:
            return str(FinishReason.ABORT)
        return str(FinishReason.STOP if self.is_cut else self.completion.finish_reason)

    @property
    def finish_reason(self) -> str | None:
        """The API's name of the reason; None while the choice is running."""
        if self.completion is None:
            return None
        reason = self.engine_reason
        return "tool_calls" if reason == FinishReason.STOP and self._num_calls else reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stop.found

    @property
    def failure(self) -> Refusal | None:
        """What to answer if the completion came to no proper end."""
        if self.completion is None or self.engine_reason not in ("error", "abort"):
            return None
        error = self.completion.error
        if error is not None and GRAMMAR_FAILED in error:  # which the client wrote
            name = self._fields["constrained_by"] or "tools"
            return Refusal(400, f"{name}: {error.rpartition('[SamplingParams] ')[2]}", param=name)
        if error is not None:
            return Refusal(500, f"the completion failed: {error}")
        runs = self._model.is_running
        why = "the client reads too slowly" if runs else "the server is stopping"
        return Refusal(503, f"the answer ended early: {why}")

    @property
    def mean_logprob(self) -> float:
        return fmean((self.completion and self.completion.logprobs) or (0.0,))

    def add(self, output: TokenOutput) -> Delta:
        """Add a token. Returns the text and the tool calls that are complete now."""
        delta = Delta()
        delta.write("text", self._echo)
        self._echo = ""
        if self._fields["max_tokens"] == 0 and output.token is not None and output.completion:
            ended = replace(output.completion, finish_reason=FinishReason.LENGTH)
            output = TokenOutput.last(ended)  # without the token, which the engine needs to end
        self.completion, self.num_cached = output.completion, output.cached_prompt_tokens
        if self.is_cut:  # tokens that were computed before the abort
            return delta
        self.num_tokens += output.token is not None
        events = self._parser.feed(output.token, output.text)
        if self._fields["logprobs"] and output.token is not None:
            delta.logprobs.append(self._placed_entry(output, output.token))
        self._read(events, delta)
        self.num_thoughts += self._parser.thinks
        if output.completion is not None and not self.is_cut:
            is_cut = output.completion.finish_reason != FinishReason.STOP
            self._read(self._parser.finish(is_cut), delta)
            if not self.is_cut:
                self._write(self._stop.rest(), delta)
        return delta

    def entry(self, delta: Delta) -> dict[str, Any]:
        """The choice, or the new part of it, in the API's form."""
        entry: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason}
        if "messages" not in self._fields:
            asked, wants = self._fields["prompt_logprobs"], self._fields["logprobs"]
            of_tokens = delta.logprobs
            if self._fields["echo"] and wants and self.completion:
                of_prompt = self._of_prompt(self.completion)
                of_tokens = of_prompt + of_tokens
                self._starts = self._prompt_starts(of_prompt) + self._starts
            logprobs = self._text_logprobs(of_tokens) if of_tokens else None
            entry |= {"text": delta.text, "logprobs": logprobs}
            if asked is None or not self.completion:
                return entry
            return entry | {"prompt_logprobs": self._as_in_vllm(self.completion, asked)}
        is_part = self._fields["stream"]
        message: dict[str, Any] = {"role": "assistant"}
        if not is_part:
            message["content"] = None if delta.tool_calls else ""
        parts = {
            "content": delta.text,
            "reasoning": delta.reasoning,
            "tool_calls": delta.tool_calls,
        }
        message |= {name: part for name, part in parts.items() if part}
        if delta.logprobs:
            entry["logprobs"] = {"content": delta.logprobs}
        return entry | {"delta" if is_part else "message": message}

    def _placed_entry(self, output: TokenOutput, token: int) -> dict[str, Any]:
        """The entry of a token that the parser has got."""
        entry = self._described(token, output.logprob, output.top_logprobs)
        if "messages" not in self._fields:
            self._offsets.text += output.text
            self._starts.append(self._offsets.of(entry["token"], output.text))
        done = output.completion
        is_end = done is not None and done.finish_reason == FinishReason.STOP
        self._placed.add(entry, self._parser.fed, is_end)
        return entry

    @property
    def _spelling(self) -> Spelling:
        return spelling_of(self._tokenizer)

    def _of_prompt(self, completion: Completion) -> list[dict[str, Any]]:
        """The entries of the prompt's tokens; the first has no log-probability."""
        count, entries = self._fields["top_logprobs"], []
        for token, known in zip(self._prompt.tokens, completion.prompt_logprobs, strict=True):
            logprob, _, top = known or (None, None, ())
            entries.append(self._described(token, logprob, top[:count]))
        return entries

    def _prompt_starts(self, entries: list[dict[str, Any]]) -> list[int]:
        """Where the tokens of the prompt begin in its text."""
        offsets, text = TextOffsets(self._prompt.text), self._spelling.text(keeps_space=True)
        starts = []
        for token, entry in zip(self._prompt.tokens, entries, strict=True):
            starts.append(offsets.of(entry["token"], text.push(token)))
        return starts

    def _as_in_vllm(self, completion: Completion, count: int) -> list[dict[int, Any] | None]:
        """For each token of the prompt, itself and the likeliest ones by token id."""
        found, text_of = list[dict[int, Any] | None](), self._spelling.text_of
        for token, known in zip(self._prompt.tokens, completion.prompt_logprobs, strict=True):
            if known is not None:
                ranked = [(*pair, rank) for rank, pair in enumerate(known.top[:count], 1)]
                found.append(
                    {
                        each: {
                            "logprob": _told(logprob),
                            "rank": rank,
                            "decoded_token": text_of(each),
                        }
                        for each, logprob, rank in [(token, known.logprob, known.rank), *ranked]
                    }
                )
            else:
                found.append(None)
        return found

    def _text_logprobs(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The entries in the form for text completions, with mlx-lm's "content" beside it."""
        starts, self._starts = self._starts, []
        return {
            "tokens": [entry["token"] for entry in logprobs],
            "token_logprobs": [entry["logprob"] for entry in logprobs],
            "top_logprobs": [
                None
                if e["logprob"] is None
                else {t["token"]: t["logprob"] for t in e["top_logprobs"]}
                for e in logprobs
            ],
            "text_offset": starts,
            "content": logprobs,
        }

    def _described(
        self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]
    ) -> dict[str, Any]:
        """The log-probability entry of a token. Its bytes may be a part of a character."""
        text_of, bytes_of = self._spelling.text_of, self._spelling.bytes_of
        own, *others = (
            {
                "id": each,
                "token": text_of(each),
                "logprob": _told(value),
                "bytes": [*bytes_of(each)],
            }
            for each, value in [(token, logprob), *top]
        )
        return own | {"top_logprobs": others}

    def _read(self, events: Sequence[Event], delta: Delta) -> None:
        """Add what the parser has found. Text that may begin a stop string is held back until more
        text, a thought or a call follows: a stop string does not go on behind these."""
        for event in events:
            if self.is_cut:
                return
            if isinstance(event, Call):
                self._write(self._stop.rest(), delta)
                delta.call(self._in_chat(event))
                self.is_cut = self._one_call
            elif isinstance(event, Thought):
                self._write(self._stop.rest(), delta)
                delta.write("reasoning", event.text)
            else:
                if self._fields["logprobs"]:
                    self._placed.expect(event)
                counts = self.num_tokens > self._fields["min_tokens"]
                self._write(self._stop.feed(event.text) if counts else event.text, delta)
                self.is_cut = self._stop.stopped
        if events and self._fields["logprobs"]:
            self._placed.decide(self._parser.decided)

    def _write(self, text: str, delta: Delta) -> None:
        """Add content."""
        placed = self._placed.take(len(text)) if self._fields["logprobs"] else ()
        delta.write("text", text, placed)

    def _in_chat(self, call: Call) -> dict[str, Any]:
        """The next call in the form of chat completions."""
        function = {"name": call.name, "arguments": call.arguments}
        own_id = call.id or str(uuid.uuid4())
        told: dict[str, Any] = {"function": function, "type": "function", "id": own_id}
        if self._fields["stream"]:
            told["index"] = self._num_calls
        self._num_calls += 1
        return told


def _told(logprob: float | None) -> float | None:
    """A log-probability as JSON can have it."""
    return logprob if logprob is None or math.isfinite(logprob) else UNLIKELY
