"""The rules for sources, in one table."""

from collections.abc import Callable, Iterator, Sequence

from ..language.tokens import TranslationError
from ..toolchain import CompileError
from . import argument_rules, call_rules, language_rules, version_rules
from .absent_arguments import absent_arguments
from .source import Finding, MetalSource
from .version_rules import LANGUAGES

Rule = Callable[[MetalSource], Iterator[tuple[str, str]]]
"""Finds places, as "file.metal:line", and says what is wrong with them."""

SOURCE_RULES: dict[str, Rule] = {
    "ascii": language_rules.ascii_text,
    "includes": language_rules.includes,
    "program-scope": language_rules.program_scope,
    "static-local": language_rules.static_locals,
    "goto": language_rules.gotos,
    "long-double": language_rules.long_doubles,
    "cxx17": language_rules.cxx17,
    "kernel-before-template": language_rules.kernel_before_template,
    "inner-threadgroup": language_rules.inner_threadgroup_variables,
    "constant-index": argument_rules.constant_indices,
    "constant-condition": argument_rules.constant_conditions,
    "buffer-index": argument_rules.buffer_indices,
    "thread-position": argument_rules.thread_positions,
    "max-threads": argument_rules.max_threads,
    "pointer-to-pointer": argument_rules.pointers_to_pointers,
    "pointer-member": argument_rules.pointer_members,
    "host-name": argument_rules.host_names,
    "recursion": call_rules.recursion,
    "fast-precise": call_rules.fast_and_precise,
    "shuffle-delta": call_rules.shuffle_deltas,
    "address-spaces": call_rules.choices_of_two_address_spaces,
    "absent-argument": absent_arguments,
    "bare-pointer": version_rules.bare_pointers,
    "generic-this": version_rules.generic_this,
    "bfloat-name": version_rules.names_of_bfloat,
}

LANGUAGES_OF = {"bare-pointer": ("3.1", "3.2", "4.0"), "generic-this": ("4.1",)}
"""The versions of Metal that have a rule; all have the others."""


def check_source(text: str, name: str, languages: Sequence[str] = LANGUAGES) -> list[Finding]:
    """What of `text`, the whole source of a library, breaks a rule of one of these versions."""
    source = MetalSource(text, name)
    found = [Finding(place, "ascii", what) for place, what in SOURCE_RULES["ascii"](source)]
    if found:  # the tokens are not to be trusted
        return found
    found = [Finding(place, "includes", what) for place, what in SOURCE_RULES["includes"](source)]
    if any("not found" in finding.message for finding in found):  # there are no tokens
        return found
    for rule, find in SOURCE_RULES.items():
        if rule in ("ascii", "includes") or not {*LANGUAGES_OF.get(rule, languages)} & {*languages}:
            continue
        try:
            found += [Finding(place, rule, what) for place, what in find(source)]
        except (CompileError, TranslationError) as error:
            found.append(Finding(f"{name}:1", rule, f"cannot be checked: {error}"))
    return sorted(set(found))
