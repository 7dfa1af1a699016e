"""Rules of Metal that neither the emulator nor `typecheck` knows, for sources and for launches."""

from .launch_rules import LAUNCH_RULES, check_call
from .source import Finding, split_instantiation
from .source_rules import LANGUAGES_OF, SOURCE_RULES, check_source
from .version_rules import LANGUAGES

RULES = (*SOURCE_RULES, *LAUNCH_RULES)
"""The names of all rules."""

__all__ = [
    "LANGUAGES",
    "LANGUAGES_OF",
    "LAUNCH_RULES",
    "RULES",
    "SOURCE_RULES",
    "Finding",
    "check_call",
    "check_source",
    "split_instantiation",
]
