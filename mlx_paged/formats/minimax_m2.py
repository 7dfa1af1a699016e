"""MiniMax M2's XML.

<minimax:tool_call>
<invoke name="f">
<parameter name="x">value</parameter>
</invoke>
</minimax:tool_call>
"""

from mlx_paged.formats.invokes import Invokes


class MiniMaxM2(Invokes):
    """All calls of a turn have one wrapper."""

    name = "minimax_m2"
    aliases = ("minimax",)
    tokens = ("<minimax:tool_call>",)
    tags = "minimax:tool_call", "invoke", "parameter"
