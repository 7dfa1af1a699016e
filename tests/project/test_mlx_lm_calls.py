"""What server, protocol and formats take of mlx-lm: nothing that divides or reads a text."""

import ast
from pathlib import Path

import mlx_paged

PACKAGE = Path(mlx_paged.__file__).parent
TAKEN = {
    "TokenizerWrapper",  # whose parser reads formats that are not known here
    "_get_classes",
    "_parse_size",
    "convert_chat",  # of chats without a template
    "get_system_fingerprint",
    "process_message_content",  # of the client's messages
}


def test_no_function_of_mlx_lm_reads_answers():
    taken = set()
    for room in ("server", "protocol", "formats", "chat"):
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mlx_lm"):
                    taken |= {alias.name for alias in node.names}
                if isinstance(node, ast.Import):
                    assert not any(alias.name.startswith("mlx_lm") for alias in node.names), path
    assert taken == TAKEN
