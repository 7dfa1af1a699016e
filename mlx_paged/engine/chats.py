"""Chats: messages become prompts, and answers are divided into text, thoughts and tool calls."""

import json
from collections.abc import Generator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_paged.arguments import require
from mlx_paged.chat.encoding import encoded
from mlx_paged.chat.rendering import rendered, reserved_names
from mlx_paged.formats import choice
from mlx_paged.formats.begins import begin_of
from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.parser import Begin, Parser
from mlx_paged.outputs import Completion, TokenOutput, ToolCall
from mlx_paged.prompt import Prompt
from mlx_paged.request import FinishReason
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.images import has_image, in_parts, is_image, knows_only_parts
from mlx_paged.vision.prompts import ImageProcessor

Message = Mapping[str, Any]
Chat = Sequence[Message]
OWN_ARGUMENTS = ("tools", "add_generation_prompt", "continue_final_message")
"""Arguments of the chat template that are arguments of :meth:`Engine.chat`."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as a prompt.

    Attributes:
        prompt: its token ids, with its images if the chat has some.
        begin: where the answer begins.
        tools: functions that the answer may call.
        continues: the answer continues the last message.
    """

    prompt: Prompt
    begin: Begin
    tools: tuple[Any, ...]
    continues: bool


class Chats:
    """What the chats of one model need.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        image_processor: makes prompts of text and images; None if the model sees no images.

    Raises:
        ValueError: the model has no chat template.
    """

    def __init__(self, tokenizer: Any, image_processor: ImageProcessor | None) -> None:
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError(
                "[chat] the model has no chat template: expected a chat model, or generate()"
            )
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._format, self._tools_problem = choice.chosen(tokenizer)
        self._only_parts = knows_only_parts(tokenizer)
        vocab = tokenizer.get_vocab()
        ends = (vocab[mark] for mark in self._format.final_marks if mark in vocab)
        self._stop_token_ids = frozenset(ends)

    def prompt(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> ChatPrompt:
        """The prompt of a chat.

        Raises:
            ValueError: as :meth:`Engine.chat`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "[chat] continue_final_message is True beside add_generation_prompt:"
                " expected add_generation_prompt=False"
            )
        if tools and self._tools_problem:
            raise ValueError(f"[chat] tools are given: expected no tools: {self._tools_problem}")
        args = dict(template_args or {})
        for name in sorted(args.keys() & reserved_names()):
            own = f"the argument {name} of chat()" if name in OWN_ARGUMENTS else "another name"
            raise ValueError(f"[chat] chat_template_kwargs has {name!r}: expected {own}")
        chat = [_plain(message) for message in messages]
        images = _taken_images(chat)
        if images and self._image_processor is None:
            raise ValueError("[chat] a message has an image: expected text, the model sees none")
        chat = in_parts(chat) if self._only_parts else chat
        declared = list(self._format.declared(tools)) if tools else None

        def render(turns: list[dict[str, Any]], **options: Any) -> str:
            turns = self._format.history(turns, bool(tools))
            return rendered(self._tokenizer, turns, tools=declared, **args, **options)

        begins = {"continue_final_message": True} if continue_final_message else {}
        try:
            text = render(chat, add_generation_prompt=add_generation_prompt, **begins)
        except Exception as error:  # a template can raise anything
            raise ValueError(f"[chat] the chat template refuses the messages: {error}") from error
        begin = begin_of(
            self._format,
            chat,
            text,
            partial(render, add_generation_prompt=False),
            adds_prompt=add_generation_prompt,
            continues=continue_final_message,
        )
        processor = self._image_processor
        if processor is not None and images:
            prompt = processor(text, images)
        else:
            special = processor is not None and processor.adds_special
            prompt = Prompt(encoded(self._tokenizer, text, add_special_tokens=special))
        return ChatPrompt(prompt, begin, (*(tools or ()),), continue_final_message)

    def params(self, prompt: ChatPrompt, params: SamplingParams) -> SamplingParams:
        """The options of a chat's request: the marks that end an answer of this format end it, and
        an answer that continues a message keeps its first space."""
        return replace(
            params,
            stop_token_ids=params.stop_token_ids | self._stop_token_ids,
            keep_space=prompt.continues if params.keep_space is None else params.keep_space,
        )

    def reader(self, prompt: ChatPrompt, params: SamplingParams) -> "Reader":
        """What divides the answer to a prompt."""
        is_data = params.constraint is not None
        return Reader(self._format.parser(prompt.tools, prompt.begin, is_data))


class Reader:
    """Divides the outputs of one request into text, thoughts and tool calls."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._text = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []
        self._is_ended = False

    def read(self, output: TokenOutput) -> TokenOutput:
        """The output, with what is certain now in place of the model's own text."""
        events = self._parser.feed(output.token, output.text)
        completion = output.completion
        if completion is not None:
            self._is_ended = True
            events += self._parser.finish(completion.finish_reason != FinishReason.STOP)
        text, reasoning, calls = "", "", list[ToolCall]()
        for event in events:
            if isinstance(event, Call):
                calls.append(ToolCall(event.name, event.arguments, event.id))
            elif isinstance(event, Text):
                text += event.text
            else:
                reasoning += event.text
        self._text += text
        self._reasoning += reasoning
        self._calls += calls
        if completion is not None:
            completion = self.completion(completion)
        return replace(
            output, text=text, reasoning=reasoning, tool_calls=(*calls,), completion=completion
        )

    def divided(self, outputs: Generator[Any]) -> Generator[Any]:
        """A stream of outputs, divided: first None, when the stream is ready; then the outputs."""
        next(outputs)
        try:
            yield
            for output in outputs:
                yield self.read(output)
        finally:
            outputs.close()

    def completion(self, completion: Completion) -> Completion:
        """The completion of the request, with its parts."""
        if not self._is_ended:  # it was aborted: no output has told its end
            self.read(TokenOutput.last(completion))
        return replace(
            completion,
            text=self._text,
            reasoning=self._reasoning,
            tool_calls=(*self._calls,),
        )


def chat_list(caller: str, messages: Any) -> list[Chat]:
    """The chats of a call: one, or a sequence of chats. Raises ValueError for anything else."""
    expected = 'a list of {"role": ..., "content": ...}, or a list of such lists'
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and messages
    require(bool(is_list), caller, "messages", messages, expected)
    chats = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for chat in chats:
        is_chat = (
            isinstance(chat, Sequence)
            and not isinstance(chat, str)
            and len(chat) > 0
            and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in chat)
        )
        require(is_chat, caller, "messages", chat, expected)
    return chats


def _plain(message: Message) -> dict[str, Any]:
    """A copy of a message as chat templates take it: text parts joined, arguments of calls as
    objects. Raises ValueError for a part that is neither text nor an image."""
    copy: dict[str, Any] = deepcopy(dict(message))
    content = copy.get("content")
    if content is None:
        copy["content"] = ""
    elif isinstance(content, list) and not has_image(content):
        is_text = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
        require(is_text, "chat", "content", content, "text, or parts of text and images")
        copy["content"] = "".join(str(part.get("text", "")) for part in content)
    for call in copy.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return copy


def _taken_images(chat: list[dict[str, Any]]) -> list[Any]:
    """The images of a chat, which leave a place each: {"type": "image", "image": bytes or PIL}."""
    images = []
    for message in chat:
        if has_image(message.get("content")):
            for part in filter(is_image, message["content"]):
                images.append(part.pop("image", None))
                require(images[-1] is not None, "chat", "image", part, '{"image": bytes or PIL}')
    return images
