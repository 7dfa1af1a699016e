"""Answers in the forms of Anthropic's Messages API and OpenAI's Responses API."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from typing import Any

from mlx_paged.protocol import messages, prompts
from mlx_paged.protocol.deltas import Delta
from mlx_paged.protocol.replies import ResponseReply
from mlx_paged.protocol.request_body import Refusal, refusing
from mlx_paged.server.answers import Answer


class MessageAnswer(Answer):
    """An answer of Anthropic's Messages API."""

    sign_of_life = messages.event({"type": "ping"})
    names = messages.NAMES

    @cached_property
    def head(self) -> dict[str, Any]:
        own = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        return own | {"model": self.fields["model"]}

    def whole(self, parts: dict[int, Delta]) -> dict[str, Any]:
        content = messages.Blocks.of(parts[0])
        return self.head | {"content": content} | self._end() | {"usage": self.usage()}

    async def _events(self) -> AsyncGenerator[bytes]:
        blocks, is_begun = messages.Blocks(), False
        async with aclosing(self._pieces()) as pieces:
            async for _, delta in pieces:
                if not is_begun:
                    is_begun, none = True, {"stop_reason": None, "stop_sequence": None}
                    begun = self.head | {"content": [], "usage": self.usage()} | none
                    yield messages.event({"type": "message_start", "message": begun})
                parts = messages.Blocks.of(delta)
                yield b"".join(blocks.events(parts))
        yield b"".join(blocks.end())
        end = {"type": "message_delta", "delta": self._end(), "usage": self.usage()}
        yield messages.event(end) + messages.event({"type": "message_stop"})

    def _error_event(self, error: Refusal) -> bytes:
        return messages.event(messages.error_json(error))

    def _end(self) -> dict[str, Any]:
        (choice,) = self.choices
        if choice.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
        reason = messages.REASONS.get(choice.finish_reason or "")
        return {"stop_reason": reason, "stop_sequence": None}

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            **self.of_cache(),
        }


class ResponseAnswer(ResponseReply, Answer):
    """An answer of OpenAI's Responses API."""

    async def _events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._pieces()) as pieces:
            async for _, delta in pieces:
                yield b"".join(self.items.add(delta))
        yield b"".join(self.end())

    def _error_event(self, error: Refusal) -> bytes:
        return b"".join(self.items.fail(error))


async def count_tokens(answer: Answer) -> int:
    """Tokens of the prompt of `answer`, which is not computed."""
    args = answer.state.args
    run = asyncio.get_running_loop().run_in_executor
    async with answer.state.models.use(answer.path, 0) as model:
        with refusing(answer.names):
            (prompt,) = await run(
                answer.threads, prompts.encode, model, answer.fields, args.chat_template_args
            )
    return len(prompt.tokens)
