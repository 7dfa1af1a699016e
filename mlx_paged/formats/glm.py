"""GLM 4.5 to 5, and Laguna: keys and plain values between tags.

<tool_call>f
<arg_key>x</arg_key>
<arg_value>value</arg_value>
</tool_call>
"""

from mlx_paged.formats.key_tags import KeyTags


class Glm(KeyTags):
    """GLM's own tags. GLM 4.7 writes them without line breaks."""

    name = "glm47"
    aliases = ("glm", "glm45", "glm4_moe", "laguna")
    tokens = "<arg_key>", "</arg_key>"
