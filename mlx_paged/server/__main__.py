"""``python -m mlx_paged.server``: an OpenAI-compatible HTTP server on a paged engine.

It understands and answers requests as mlx-lm's server does, and computes all of them in one batch.
It adds ``n``, ``/metrics``, log-probabilities in streams, a bounded queue (503), API keys (401),
limits for requests (413 and 400), and errors in the API's form. It serves one model.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING

from mlx_lm.server import ModelProvider

from mlx_paged.cli import demo_model_path
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.service import EngineService
from mlx_paged.server import arguments

if TYPE_CHECKING:  # they need the extra "server"; `main` reports if it is missing
    from mlx_paged.server.backend import Backend
    from mlx_paged.server.http import Server

FAREWELL_S = 2.0
"""Time for open answers to end when the server stops."""


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status: 0, or 2 after a mistake."""
    args = arguments.parse(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    try:
        with serving(args) as server:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
            host, port = server.server_address[:2]
            logging.info("serving %s on http://%s:%s", args.model, host, port)
            server.serve_forever(poll_interval=0.1)
        return 0
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: expected pip install 'mlx_paged[server]'"
    except (ValueError, OSError) as error:
        message = str(error)
    print(f"mlx_paged.server: error: {message}", file=sys.stderr)
    return 2


@contextmanager
def serving(args: argparse.Namespace) -> Iterator["Server"]:
    """A server that listens. Its ``serve_forever`` answers requests and may run in any thread.

    Raises:
        ValueError: the model cannot be loaded or served, or an option is out of range.
        OSError: the address is in use.
        ModuleNotFoundError: the extra "server" is not installed.
    """
    from mlx_paged.server.backend import Backend
    from mlx_paged.server.http import DisconnectWatcher, Server

    args.model = args.model or str(demo_model_path())
    provider = _load(args)
    engine = Engine(provider.model, provider.tokenizer, **arguments.engine_options(args))
    with closing(DisconnectWatcher()) as watcher, EngineService(engine) as service:
        backend = Backend(provider, service)
        server = Server((args.host, args.port), backend, watcher)
        if args.api_key is None and not ip_address(str(server.server_address[0])).is_loopback:
            logging.warning("%s is open to others: consider --api-key", args.host)
        try:
            yield server
        finally:
            server.server_close()
            service.close()
            _await_answers(backend)


def _load(args: argparse.Namespace) -> ModelProvider:
    provider = ModelProvider(args)
    try:
        provider.load_default()
    except Exception as error:
        detail = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model {args.model}: {type(error).__name__}: {detail}") from error
    provider.processor = None  # the server refuses images
    return provider


def _await_answers(backend: "Backend") -> None:
    """Wait until the threads of aborted answers have told their clients."""
    deadline = time.monotonic() + FAREWELL_S
    while backend.taken and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
