"""Reads messages from the terminal, and prints the answers of a model as they come."""

import argparse
import re
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from mlx_paged.arguments import did_you_mean, one_line
from mlx_paged.engine.engine import Engine
from mlx_paged.loading import engine_options, load_model
from mlx_paged.outputs import TokenOutput

PROMPT = ">> "
LONGEST_CHAT = 1 << 17  # tokens for which the pool has room, if the memory has
HELP = """q: leave
r: begin a new chat
h: show these commands
Ctrl-C: stop the answer, which stays in the chat as far as it came"""
COMMANDS = {
    **dict.fromkeys(("q", "/q", "/quit", "/exit", "/bye"), "leave"),
    **dict.fromkeys(("r", "/r", "/reset", "/clear", "/new"), "restart"),
    **dict.fromkeys(("h", "/h", "/help", "/?"), "help"),
}
"""What a line does that is not a message. The names with a slash are those of other chats."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves. Returns 0. Raises ValueError for a model that cannot chat."""
    model, tokenizer = load_model(args.model, args.adapter_path, args.trust_remote_code)
    if not tokenizer.has_chat_template:
        raise ValueError(
            f"model {args.model}: the model has no chat template: expected a chat model"
        )
    engine = Engine(
        model,
        tokenizer,
        max_running=1,
        max_kv_tokens=LONGEST_CHAT,
        prefill_chunk=args.prefill_step_size,
        **engine_options(args),
    )
    with suppress(ImportError):  # arrow keys and a history, where Python has it
        import readline  # noqa: F401
    try:
        Session(engine, args).run()
    finally:
        engine.close()
    return 0


class Session:
    """A chat of one user.

    Attributes:
        messages: of the chat so far.
    """

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._engine = engine
        self._args = args
        self._options: dict[str, Any] = {
            "max_tokens": args.max_tokens,
            "temperature": args.temp,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "xtc_probability": args.xtc_probability,
            "xtc_threshold": args.xtc_threshold,
            "xtc_special_tokens": special,
            "chat_template_kwargs": args.chat_template_config,
        }
        self._is_dimmed = sys.stdout.isatty()
        self.messages: list[dict[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Begin a new chat."""
        system = self._args.system_prompt
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def run(self) -> None:
        """Answer each line that the user types, until q or the end of the input."""
        if sys.stdin.isatty():
            print(HELP)
        while (line := self._read()) is not None:
            command = COMMANDS.get(line)
            if command == "leave":
                return
            if command == "restart":
                self.restart()
            elif command == "help":
                print(HELP)
            elif re.fullmatch(r"/[a-z]+", line):
                print(f"error: {line} is no command{did_you_mean(line, COMMANDS)}", file=sys.stderr)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            return input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            stream = self._engine.stream_chat(self.messages, **self._options)
        except ValueError as error:  # of this message, such as one that is too long
            self.messages.pop()
            print(f"error: {one_line(error)}", file=sys.stderr)
            return
        said: list[str] = []
        try:
            self._print(stream, said)
        except KeyboardInterrupt:
            print(f"{PLAIN if self._is_dimmed else ''}\n(stopped)")
        finally:
            stream.close()
        self.messages.append({"role": "assistant", "content": "".join(said)})

    def _print(self, stream: Generator[TokenOutput], said: list[str]) -> None:
        """Print an answer as it comes. The pieces of its text, without thoughts, go to `said`."""
        is_thinking = False
        for output in stream:
            if output.reasoning and not self._args.hide_thoughts:
                if self._is_dimmed and not is_thinking:
                    print(DIM, end="")
                is_thinking = True
                print(output.reasoning, end="", flush=True)
            text = output.text if said else output.text.lstrip()
            if text and is_thinking:
                print(PLAIN if self._is_dimmed else "", end="\n\n")
                is_thinking = False
            said += [text] if text else []
            print(text, end="", flush=True)
            if output.completion is not None and output.completion.error is not None:
                print(f"error: {output.completion.error}", file=sys.stderr)
        if is_thinking and self._is_dimmed:
            print(PLAIN, end="")
        print()
