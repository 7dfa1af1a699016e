"""Where a thought begins and ends."""

from collections.abc import Mapping
from typing import NamedTuple

from mlx_paged.formats.marks import Marks


class Thoughts(NamedTuple):
    """The marks around a thought, as text."""

    start: str
    end: str


STYLES = {
    "think": Thoughts("<think>", "</think>"),
    "longcat": Thoughts("<longcat_think>", "</longcat_think>"),
    "think_pipes": Thoughts("<|think:start|>", "<|think:end|>"),
    "seed": Thoughts("<seed:think>", "</seed:think>"),
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "cohere": Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": Thoughts("<|inner_prefix|>", "<|inner_suffix|>"),
    "gemma4": Thoughts("<|channel>thought\n", "<channel|>"),
    "xtml": Thoughts("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}
"""Marks by the name that ``--reasoning-format`` has for them."""

NONE = "none"
"""The name for models that do not think."""


def chosen(
    vocab: Mapping[str, int], template: str | None, name: str | None = None
) -> Thoughts | None:
    """The marks of a model: those of the style `name`; else those that are its tokens; else those
    that its chat template writes. None if it does not think.

    Raises:
        ValueError: there is no such style.
    """
    if name == NONE:
        return None
    if name is not None:
        if name not in STYLES:
            known = ", ".join((*STYLES, NONE))
            raise ValueError(f"--reasoning-format: expected one of {known}, got {name!r}")
        return STYLES[name]
    for style in STYLES.values():
        if all(part in vocab for part in _tokens_of(style)):
            return style
    for style in (STYLES["think"], STYLES["seed"]):
        if template and style.start in template and style.end in template:
            return style
    return None


def _tokens_of(style: Thoughts) -> list[str]:
    """The tokens that a style needs: its marks, or the parts of marks that have several."""
    if style == STYLES["gemma4"]:
        return ["<|channel>", "<channel|>"]
    if style == STYLES["xtml"]:
        return ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    return [*style]


def coded(marks: Marks, thoughts: Thoughts) -> Thoughts:
    """The same marks in coded text."""
    for part in ("<|channel>", "<channel|>", "<|open|>", "<|close|>", "<|sep|>"):
        marks.code(part)
    start, end = (marks.code(mark) for mark in thoughts)
    return Thoughts(marks.coded_text(start), marks.coded_text(end))
