"""Calls of FunctionGemma, which are those of Gemma 4 with other marks.

<start_function_call>call:f{x:<escape>text<escape>,n:2}<end_function_call>
"""

from mlx_paged.formats.gemma4 import Gemma4


class FunctionGemma(Gemma4):
    """The same literals between other tokens."""

    name = "function_gemma"
    aliases = ("functiongemma",)
    tokens = "<start_function_call>", "<end_function_call>", "<escape>"
