"""Compiles sources of grammars in processes apart, where llguidance can be stopped. Knows no mlx.

A source that takes too long or too much memory there is refused. Such a process runs this file and
imports nothing of the package.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

MAX_SECONDS = 2.0  # of processors for one source: other processes do not count
MAX_WAIT = 30.0  # seconds until a source is refused that gets no processor
MAX_BYTES = 200 << 20  # beyond what the process takes before its first source
MAX_PROCESSES = 2  # so many sources are tried at a time
MAX_WAITING = 16  # sources that wait for one of them; beyond, the compiler is busy
STACK_BYTES = 1 << 27
NUM_TOKENS = 1 << 18  # of the vocabulary; only the first 256 have a text


class Refused(ValueError):
    """A source takes too long or too much memory."""


class Busy(RuntimeError):
    """Too many sources wait."""


class Trials:
    """Tries sources, several at a time. Any thread may call it.

    A process lives until a source takes too much in it, or until this process ends.
    """

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)
        self._lock = threading.Lock()  # guards the next two
        self._idle: list[subprocess.Popen[bytes]] = []
        self._num_waiting = 0

    def check(self, kind: str, source: str) -> None:
        """Try a source of the kind json_schema, regex or grammar. Whether it is right is not said.

        Raises:
            Refused: it takes more than MAX_SECONDS, MAX_WAIT or MAX_BYTES.
            Busy: MAX_WAITING others wait.
        """
        with self._lock:
            if self._num_waiting >= MAX_PROCESSES + MAX_WAITING:
                raise Busy
            self._num_waiting += 1
        try:
            with self._places:
                self._try(json.dumps([kind, source]).encode() + b"\n")
        finally:
            with self._lock:
                self._num_waiting -= 1

    def close(self) -> None:
        """End the processes; a later source starts another one."""
        with self._lock:
            while self._idle:
                _end(self._idle.pop())

    def _try(self, line: bytes) -> None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:  # it was ended from outside
            _end(process)
            process = None
        process = process or _start()
        if process is None:
            return
        answer = b""
        with suppress(OSError):  # it was ended from outside
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer:
            with self._lock:
                self._idle.append(process)
            return
        _end(process)
        most = f"{MAX_SECONDS:g} s or {MAX_BYTES >> 20} MiB"
        raise Refused(f"the compiler takes more than {most}")


def _start() -> "subprocess.Popen[bytes] | None":
    """A process that takes sources; None if none can be had here."""
    try:
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    assert process.stdout is not None
    if process.stdout.readline():
        return process
    _end(process)
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _compile(tokens: Any, kind: str, source: str) -> None:
    from llguidance import LLMatcher, LLParserLimits

    name = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}[kind]
    with suppress(ValueError):  # it is compiled again where its mistake is told
        grammar = getattr(LLMatcher, f"grammar_from_{name}")(source)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()


def main() -> None:
    """Try the sources of standard input; answer each with a line, or end."""
    from llguidance import LLTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    with suppress(OSError):
        os.nice(5)
    threading.stack_size(STACK_BYTES)
    tokens, most = LLTokenizer("byte", n_vocab=NUM_TOKENS), _peak() + MAX_BYTES
    _answer(b"ready")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # the system ends the process then
        signal.setitimer(signal.ITIMER_REAL, MAX_WAIT)
        thread = threading.Thread(target=_compile, args=(tokens, *json.loads(line)), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.005)
            if _peak() > most:
                os._exit(1)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        _answer(b"tried")


def _answer(word: bytes) -> None:
    sys.stdout.buffer.write(word + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
