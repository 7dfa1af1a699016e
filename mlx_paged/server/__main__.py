"""``python -m mlx_paged.server``: an OpenAI-compatible HTTP server on a paged engine.

It understands and answers requests as mlx-lm's server does, and computes all of them in one batch.
A field of a request is obeyed or refused. Starlette and uvicorn speak HTTP.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING

from mlx_paged.arguments import missing
from mlx_paged.cli import demo_model_path
from mlx_paged.server import flags

if TYPE_CHECKING:  # they need the extra "server"; `main` reports if it is missing
    from mlx_paged.server.listener import Server


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status: 0, or 2 after a mistake."""
    args = flags.parse(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    try:
        with serving(args) as server:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again
            host, port = server.address
            scheme = "https" if args.ssl_certfile else "http"
            logging.info("serving %s on %s://%s:%s", args.model, scheme, host, port)
            server.run()
        return 0
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError as error:
        message = missing(str(error.name), "server")
    except (ValueError, OSError) as error:
        message = str(error)
    print(f"mlx_paged.server: error: {message}", file=sys.stderr)
    return 2


@contextmanager
def serving(args: argparse.Namespace) -> Iterator["Server"]:
    """A server that listens. Its ``run`` answers requests and may run in any thread. Raises
    ValueError for a model, an option or the address, OSError for a file of TLS,
    ModuleNotFoundError without the extra "server"."""
    from mlx_paged.server.listener import Server
    from mlx_paged.server.models import Models

    args.model = args.model or str(demo_model_path())
    models = Models(args)
    server = Server(args, models)
    try:
        models.start()
        server.listener.listen(2048)
        if args.api_key is None and not ip_address(server.address[0]).is_loopback:
            logging.warning("%s is open to others: consider --api-key", args.host)
        yield server
    finally:
        server.listener.close()
        models.close()


if __name__ == "__main__":
    sys.exit(main())
