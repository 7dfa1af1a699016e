"""An HTTP answer of JSON."""

from typing import Any

from starlette.responses import JSONResponse

from mlx_paged.protocol.json_text import written


class JsonAnswer(JSONResponse):
    """An answer of JSON in ASCII, which every text of Python can be written in."""

    def render(self, content: Any) -> bytes:
        return written(content).encode()
