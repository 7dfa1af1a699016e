"""Answers HTTP requests. Adds choices, limits, API keys and errors to mlx-lm's handler."""

import hmac
import io
import json
import logging
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from mlx_lm.server import CompletionRequest, ToolCallFormatter, get_system_fingerprint

from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server import request_body
from mlx_paged.server.backend import Backend, BusyError, Generation
from mlx_paged.server.choices import CompletionChoice, Delta, Logprob
from mlx_paged.server.metrics import CONTENT_TYPE
from mlx_paged.server.responses import AnswerWriter, RequestError

PATHS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")


class DisconnectWatcher:
    """Watches any number of connections from one thread.

    A client counts as gone when it closes its sending side. HTTP clients do that only when they
    want no answer any more.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards the selector's registrations
        self._here, self._there = socket.socketpair()
        self._selector.register(self._here, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mlx_paged.watcher", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, connection: socket.socket, gone: Callable[[], object]) -> Iterator[None]:
        """In this context, the watcher's thread calls `gone` if the client disconnects."""
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, gone)
        try:
            yield
        finally:
            self._forget(connection)

    def close(self) -> None:
        """Stop the thread."""
        self._there.close()
        self._thread.join()
        self._here.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._here:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self._look(key.fileobj, key.data)

    def _look(self, connection: socket.socket, gone: Callable[[], object]) -> None:
        """Handle a connection that became readable: it has ended, or it has sent more bytes."""
        try:
            ended = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if self._forget(connection) and ended:
            gone()

    def _forget(self, connection: socket.socket) -> bool:
        """Stop watching a connection. Returns False if it was not watched."""
        with self._lock:
            try:
                self._selector.unregister(connection)
            except (KeyError, ValueError):
                return False
            return True


class Handler(AnswerWriter):
    """Answers one request. mlx-lm's handler parses the options and formats the packets."""

    def __init__(self, backend: Backend, watcher: DisconnectWatcher, *args: Any, **kw: Any) -> None:
        self.backend = backend
        self.watcher = watcher
        self._parsed: tuple[CompletionRequest, list[str]] | None = None
        super().__init__(backend, *args, **kw)

    def do_POST(self) -> None:
        try:
            self._authorize()
            request, n, stop, template_args = self._read_request()
            self._complete(request, n, stop, template_args)
        except RequestError as error:
            self._refuse(error)
        except (ConnectionError, TimeoutError) as error:
            logging.info("client disconnected: %s", error)
            self.close_connection = True
        except Exception:  # e.g. from the tokenizer's tool parser
            logging.exception("an answer failed")
            self._refuse(RequestError(500, "the answer could not be made"))

    def do_GET(self) -> None:
        try:
            if self.path == "/health":
                self.handle_health_check()
                return
            self._authorize()
            if self.path == "/metrics":
                self._send(HTTPStatus.OK, self.backend.metrics.text(), CONTENT_TYPE)
            elif self.path.split("?")[0].rstrip("/") == "/v1/models":
                self._send_json(HTTPStatus.OK, {"object": "list", "data": [self._model()]})
            elif self.path == f"/v1/models/{self._model()['id']}":
                self._send_json(HTTPStatus.OK, self._model())
            else:
                raise RequestError(404, f"there is nothing at {self.path}")
        except RequestError as error:
            self._refuse(error)

    def _complete(
        self,
        request: CompletionRequest,
        n: int,
        stop: list[str],
        template_args: dict[str, Any] | None,
    ) -> None:
        try:
            params = self._params(stop)
            generation = self.backend.submit(request, n, params, template_args)
        except ValueError as error:
            raise RequestError(400, str(error)) from error
        except BusyError as error:
            raise RequestError(503, f"{error}: try again later", "overloaded") from error
        except RuntimeError as error:
            raise RequestError(503, str(error)) from error
        with generation, self.watcher.watching(self.connection, generation.abort):
            choices = [self._choice(i, request, generation, params) for i in range(n)]
            if self.stream:
                self._stream(generation, choices)
            else:
                self._answer(generation, choices)

    def _answer(self, generation: Generation, choices: list[CompletionChoice]) -> None:
        """Send the whole answer when all completions have ended."""
        whole = [Delta() for _ in choices]
        for index, output in self._outputs(generation):
            whole[index] += choices[index].add(output)
        packets = [
            self._packet(choice, delta, generation)
            for choice, delta in zip(choices, whole, strict=True)
        ]
        answer = packets[0] | {"choices": [packet["choices"][0] for packet in packets]}
        self._send_json(HTTPStatus.OK, answer)

    def _stream(self, generation: Generation, choices: list[CompletionChoice]) -> None:
        """Send each piece of text as a server-sent event."""
        self._set_stream_headers(HTTPStatus.OK)
        self.end_headers()
        self._is_streaming = True
        for index, output in self._outputs(generation):
            delta = choices[index].add(output)
            if delta or output.completion is not None:
                self._send_event(self._packet(choices[index], delta, generation))
        if (self.stream_options or {}).get("include_usage"):
            self._send_event(self.completion_usage_response(*_usage(generation)))
        self.wfile.write(b"data: [DONE]\n\n")

    def _outputs(self, generation: Generation) -> Iterator[tuple[int, TokenOutput]]:
        """The generation's tokens.

        Raises:
            RequestError: a completion failed or was aborted.
        """
        try:
            for index, output in generation.outputs():
                if output.completion is not None:
                    _require_success(output.completion)
                yield index, output
        except RequestError:
            raise
        except Exception as error:  # the error that ended the service
            raise RequestError(500, f"the engine failed: {error}") from error

    def _packet(
        self, choice: CompletionChoice, delta: Delta, generation: Generation
    ) -> dict[str, Any]:
        """One choice, or the new part of it, in the API's form."""
        prompt, generated, cached = _usage(generation)
        packet: dict[str, Any] = self.generate_response(
            delta.text,
            choice.finish_reason,
            prompt,
            generated,
            cached,
            tool_calls=delta.tool_calls,
            reasoning_text=delta.reasoning,
        )
        content = packet["choices"][0]
        content["index"] = choice.index
        if delta.logprobs:
            is_chat = self.object_type.startswith("chat")
            entries = delta.logprobs
            content["logprobs"] = {"content": entries} if is_chat else choice.text_logprobs(entries)
        return packet

    def _authorize(self) -> None:
        key = self.backend.cli_args.api_key
        given = self.headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(
            given.encode("utf-8", "replace"), f"Bearer {key}".encode()
        ):
            with suppress(RequestError):
                self.num_unread = self._content_length()
            raise RequestError(401, "no valid API key was given", "invalid_api_key")

    def _read_request(self) -> tuple[CompletionRequest, int, list[str], dict[str, Any] | None]:
        """The request, its number of choices, stop strings and chat template arguments."""
        self.num_unread = length = self._content_length()
        if self.path not in PATHS:
            raise RequestError(404, f"there is nothing at {self.path}")
        limit = self.backend.cli_args.max_request_bytes
        if length > limit:
            raise RequestError(413, f"the body has {length} bytes: expected at most {limit}")
        raw, self.num_unread = self.rfile.read(length), 0
        try:
            body = request_body.parse(raw)
            is_chat = "chat" in self.path
            body, n = request_body.adapt(body, is_chat, self.backend.cli_args.max_samples)
        except ValueError as error:
            raise RequestError(400, str(error)) from error
        if body.get("model", "default_model") not in ("default_model", self._model()["id"]):
            raise RequestError(
                404, f"model {body['model']!r} is not served here", "model_not_found"
            )
        request, stop = self._parse_as_mlx_lm(json.dumps(body).encode())
        return request, n, stop, body.get("chat_template_kwargs")

    def _parse_as_mlx_lm(self, raw: bytes) -> tuple[CompletionRequest, list[str]]:
        """Let mlx-lm's handler check the body and set its attributes from it."""
        connection = self.rfile, self.wfile
        self.rfile, self.wfile = io.BytesIO(raw), io.BytesIO()
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(raw))
        self._is_parsing, self._status = True, 0
        try:
            super().do_POST()
            refusal = self.wfile.getvalue()
        finally:
            self.rfile, self.wfile = connection
            self._is_parsing = False
        if self._parsed is None:
            raise RequestError(self._status, _message(refusal))
        return self._parsed

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        """mlx-lm's handler calls this with a valid request."""
        self._parsed = request, stop_words

    def _params(self, stop: list[str]) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            xtc_special_tokens=self.backend.xtc_special_tokens,
            repetition_penalty=self.repetition_penalty,
            repetition_context_size=self.repetition_context_size,
            presence_penalty=self.presence_penalty,
            presence_context_size=self.presence_context_size,
            frequency_penalty=self.frequency_penalty,
            frequency_context_size=self.frequency_context_size,
            logit_bias=self.logit_bias or {},
            logprobs=max(0, self.top_logprobs),
            stop=tuple(stop),
            seed=None if self.seed is None else self.seed % 2**64,
        )

    def _choice(
        self, index: int, request: CompletionRequest, generation: Generation, params: SamplingParams
    ) -> CompletionChoice:
        tokenizer = self.backend.tokenizer
        tools = ToolCallFormatter(tokenizer.tool_parser, request.tools, self.stream)
        wanted = self.logprobs or params.logprobs > 0
        describe = self._describe if wanted else None
        return CompletionChoice(index, self.backend.text_machine, generation.state, tools, describe)

    def _describe(self, output: TokenOutput) -> Logprob:
        assert output.token is not None
        top = [self._token(*pair) for pair in output.top_logprobs]
        return self._token(output.token, output.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Logprob:
        text = self.backend.tokenizer.decode([token])
        return {"id": token, "token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _content_length(self) -> int:
        text = self.headers.get("Content-Length")
        if text is None:
            raise RequestError(411, "Content-Length: expected, but not given")
        if not (text.isascii() and text.isdigit()):
            raise RequestError(400, f"Content-Length is {text!r}: expected a number of bytes")
        return int(text)

    def _model(self) -> dict[str, Any]:
        """The served model in the API's form."""
        name = self.backend.cli_args.model
        return {"id": name, "object": "model", "created": self.created, "owned_by": "mlx_paged"}


class Server(ThreadingHTTPServer):
    """Listens for connections and handles each one in its own thread.

    Args:
        address: host and port; port 0 takes a free port.

    Raises:
        OSError: the address is in use, or the host does not exist.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], backend: Backend, watcher: DisconnectWatcher
    ) -> None:
        self.backend = backend
        self.address_family, *_, resolved = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        fingerprint = get_system_fingerprint()
        handler = partial(Handler, backend, watcher, system_fingerprint=fingerprint)
        super().__init__(resolved, handler)  # type: ignore[arg-type]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error outside of an answer. A client that disconnects is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            logging.exception("error while serving %s", client_address)


def _require_success(completion: Completion) -> None:
    if completion.finish_reason is FinishReason.ERROR:
        raise RequestError(500, f"the completion failed: {completion.error}")
    if completion.finish_reason is FinishReason.ABORT:
        raise RequestError(503, "the completion was taken back")


def _usage(generation: Generation) -> tuple[int, int, int]:
    """Numbers of prompt tokens, of tokens in ended completions, and of cached prompt tokens."""
    done = list(generation.completions.values())
    cached = max((completion.cached_prompt_tokens for completion in done), default=0)
    return generation.num_prompt, sum(len(completion.tokens) for completion in done), cached


def _message(refusal: bytes) -> str:
    """The error message in mlx-lm's answer, whose body may be JSON or plain text."""
    body = refusal.partition(b"\r\n\r\n")[2]
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace") or "the request is refused"
