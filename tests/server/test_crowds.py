"""More clients at once than the server has files do not disturb it."""

import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, suppress

import pytest

from tests.support.commands.server_harness import TIMEOUT, wait_until

FILES = 300
CROWD = 500


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets a limit of another process")
def test_a_crowd_of_connections_does_not_fill_the_log(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stream:
        command = ["-m", "mlx_paged.server", "--port", "0", "--kv-memory", "0.05"]
        process = subprocess.Popen(
            [sys.executable, *command, "--max-connections", "8"], stderr=stream
        )
    try:
        wait_until(lambda: b"serving" in log.read_bytes() and b"\n" in log.read_bytes()[-1:])
        port = int(log.read_text().split("serving", 1)[1].split("\n")[0].rsplit(":", 1)[1])
        url = f"http://127.0.0.1:{port}/health"
        wait_until(lambda: is_well(url))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        with ExitStack() as stack:
            process.send_signal(signal.SIGSTOP)  # so that all of them wait at once
            for _ in range(CROWD):
                wire = socket.create_connection(("127.0.0.1", port), TIMEOUT)
                stack.enter_context(wire)
            process.send_signal(signal.SIGCONT)
            with suppress(ConnectionResetError):
                assert wire.recv(1) == b""  # the last one is closed
        wait_until(lambda: is_well(url))
        assert "Traceback" not in log.read_text() and "accept" not in log.read_text()
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
