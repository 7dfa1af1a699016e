"""``mlx_paged server``: OpenAI's API and Anthropic's Messages API over HTTP.

It understands and answers requests as mlx-lm's server does, and computes all of them in one batch.
A field of a request is obeyed or refused. Starlette and uvicorn speak HTTP.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_paged.starting import start

if TYPE_CHECKING:  # they need the extra "server"; `main` reports if it is missing
    from mlx_paged.server.listener import Server

LOGGER = logging.getLogger("mlx_paged.server")


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM, which raise KeyboardInterrupt. Returns 2 after a mistake."""
    from mlx_paged.arguments import UntestedVersionError, missing, one_line, require_versions
    from mlx_paged.server import flags, heap

    args = flags.parse(argv)
    heap.limit_arenas()
    _log_to_stderr(args.log_level, args.log_format)
    try:
        require_versions()
        with serving(args) as server:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again
            LOGGER.info("serving %s on %s", args.model, server.url)
            server.run()
        return 0
    except ModuleNotFoundError as error:
        message = missing(str(error.name), "server")
    except (ValueError, OSError, UntestedVersionError) as error:
        message = one_line(error)
    print(f"mlx_paged.server: error: {message}", file=sys.stderr)
    return 2


def _log_to_stderr(level: str, log_format: str) -> None:
    from mlx_paged.server.log_format import FORMATS

    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[log_format])
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def serving(args: argparse.Namespace) -> Iterator["Server"]:
    """A server that listens. Its ``run`` answers requests and may run in any thread. Raises
    ValueError for a model, an option or the address, OSError for a file that cannot be read,
    ModuleNotFoundError without the extra "server"."""
    from mlx_paged.cli import check_flags, demo_model_path
    from mlx_paged.server import sockets

    args.model = args.model or str(demo_model_path())
    check_flags(args)
    listener = sockets.bound(args)  # a port that is taken is told before slow imports
    address = sockets.address_of(listener)
    try:
        from mlx_paged.server.listener import Server
        from mlx_paged.server.models import Models

        models = Models(args)
        server = Server(args, models, listener)
    except BaseException:
        sockets.close(listener, address)
        raise
    try:
        models.start()
        sockets.listen(listener, args)
        if sockets.is_open_to_others(listener) and not args.api_keys:
            LOGGER.warning("%s is open to others: consider --api-key", args.host)
        yield server
    finally:
        sockets.close(listener, address)
        models.close()


if __name__ == "__main__":
    start(main, interrupted=0)
