"""``python -m mlx_paged.server``: an OpenAI-compatible HTTP server on a paged engine.

mlx-lm's server in what it understands and answers, with all requests in one batch, whatever their
options. What there is beyond it: ``n``, ``/metrics``, log-probabilities in streams, a bounded queue
(503), keys (401), bounded requests (413 and 400), and errors in the API's form. One model is
served, the one given at the start.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from mlx_lm.server import ModelProvider

from mlx_paged.cli import demo_model_path
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.service import EngineService
from mlx_paged.server import arguments
from mlx_paged.server.disconnects import DisconnectWatcher

if TYPE_CHECKING:  # at run time they need the extra "server", of which `main` can tell
    from mlx_paged.server.backend import Backend
    from mlx_paged.server.http import Server

FAREWELL_S = 2.0
"""How long answers under way may take to end when the server does."""


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status: 0, or 2 after a mistake."""
    args = arguments.parse(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    try:
        with serving(args) as server:
            signal.signal(signal.SIGTERM, _interrupt)
            host, port = server.server_address[:2]
            logging.info("serving %s on http://%s:%s", args.model, host, port)
            server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError as error:
        return _mistake(f"{error.name} is missing: expected pip install 'mlx_paged[server]'")
    except (ValueError, OSError) as error:
        return _mistake(str(error))
    return 0


def _mistake(message: str) -> int:
    print(f"mlx_paged.server: error: {message}", file=sys.stderr)
    return 2


@contextmanager
def serving(args: argparse.Namespace) -> Iterator["Server"]:
    """A server that listens, and whose ``serve_forever`` answers, in whatever thread it is called.

    Raises:
        ValueError: the model cannot be loaded or served, or an option is out of range.
        OSError: the address is taken.
        ModuleNotFoundError: the extra "server" is not installed.
    """
    from mlx_paged.server.backend import Backend
    from mlx_paged.server.http import Server

    args.model = args.model or str(demo_model_path())
    provider = _load(args)
    engine = Engine(provider.model, provider.tokenizer, **arguments.engine_options(args))
    with closing(DisconnectWatcher()) as watcher, EngineService(engine) as service:
        backend = Backend(provider, service)
        server = Server((args.host, args.port), backend, watcher)
        if args.api_key is None and not _is_loopback(str(server.server_address[0])):
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
    provider.processor = None  # images are refused
    return provider


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _await_answers(backend: "Backend") -> None:
    """Let the threads of aborted answers tell their clients."""
    deadline = time.monotonic() + FAREWELL_S
    while backend.taken and time.monotonic() < deadline:
        time.sleep(0.01)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
