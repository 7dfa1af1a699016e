"""Writes answers: JSON, server-sent events, and errors in the API's form."""

import json
import logging
from http import HTTPStatus
from typing import Any

from mlx_lm.server import APIHandler

from mlx_paged.server.backend import Backend

RETRY_AFTER_S = 1
SOCKET_TIMEOUT_S = 120.0
MAX_DRAINED = 64 << 20
"""Maximum bytes of a refused body that the server reads. Clients read the answer after sending."""


class RequestError(Exception):
    """The answer to a request that gets no completion."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class AnswerWriter(APIHandler):
    """mlx-lm's handler with other methods to write answers."""

    timeout = SOCKET_TIMEOUT_S  # of every read and write
    backend: Backend
    rfile: Any
    wfile: Any
    headers: Any
    num_unread = 0  # bytes of the body that are still to be read
    _status = 0
    _is_parsing = False  # mlx-lm's handler checks a body; its output goes to a buffer
    _is_streaming = False

    def _refuse(self, error: RequestError) -> None:
        if self._is_streaming:
            self._send_event(error.as_json())
            return
        self._drain()
        headers = {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if error.code == "overloaded":
            headers["Retry-After"] = str(RETRY_AFTER_S)
        self._send_json(error.status, error.as_json(), headers)

    def _drain(self) -> None:
        remaining = min(self.num_unread, MAX_DRAINED)
        while remaining > 0:
            read = self.rfile.read(min(remaining, 1 << 16))
            if not read:
                break
            remaining -= len(read)

    def _send_json(
        self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        self._send(status, json.dumps(content).encode(), "application/json", headers)

    def _send(
        self, status: int, content: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(content)

    def _send_event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def send_response(self, code: int, message: str | None = None) -> None:
        self._status = int(code)
        if not self._is_parsing:
            self.backend.metrics.count_response(code)
        super().send_response(code, message)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that Python's HTTP server refuses."""
        self.close_connection = True
        error = RequestError(code, message or HTTPStatus(code).phrase)
        self.headers = getattr(self, "headers", None) or {}
        self._send_json(code, error.as_json())

    def log_message(self, format: str, *args: Any) -> None:
        if not self._is_parsing:
            logging.info("%s " + format, self.address_string(), *args)
