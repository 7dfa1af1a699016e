"""Seed-OSS's XML: that of Qwen3-Coder with other tags, and values without lines of their own.

<seed:tool_call>
<function=f>
<parameter=x>value</parameter>
</function>
</seed:tool_call>
"""

from mlx_paged.formats.qwen3_coder import Qwen3Coder


class SeedOss(Qwen3Coder):
    """A value is all of the text between its tags."""

    name = "seed_oss"
    aliases = ("seed",)
    tokens = ("<seed:tool_call>",)
    tags = "<seed:tool_call>", "</seed:tool_call>"
    line = ""
