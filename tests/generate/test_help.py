"""The --help of both commands."""

import pytest

from mlx_paged.generate.flags import make_parser as make_generate_parser
from mlx_paged.server.flags import make_parser as make_server_parser


@pytest.mark.parametrize("make_parser", [make_generate_parser, make_server_parser])
def test_help_explains_every_flag_and_shows_each_default_once(make_parser):
    parser = make_parser()
    assert all(action.help for action in parser._actions)
    text = " ".join(parser.format_help().split())
    assert "sampling temperature; 0 is greedy decoding (default: 0.0)" in text
    assert "tokens per KV block (default: 16)" in text
    assert "default: leaves room for others)" in text
    assert "(default: None)" not in text and "(default: False)" not in text
    assert all(help.count("(default") <= 1 for help in text.split(" --"))
