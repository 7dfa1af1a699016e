"""Compiles JSON schemas, regular expressions and grammars by llguidance. Knows no mlx."""

import threading
from collections import OrderedDict
from typing import Any

from mlx_paged.grammar.state import GrammarState, Matcher
from mlx_paged.sampling_params import SamplingParams

MAX_BYTES = 1 << 16
"""Longest source. llguidance compiles it in seconds at most, with the interpreter's lock free."""

MAX_COMPILED = 256
"""Compiled sources that are kept, the latest ones."""

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in one line, as Python writes it. A schema's own "x-guidance" overrides this."""


class Grammars:
    """The grammars of one tokenizer, compiled once each. Any thread may call it.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper, or None.
        vocab_size: tokens that the model knows; None: as many as the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # one source at a time: others keep their processors
        self._compiled: OrderedDict[tuple[str, str], Matcher | ValueError] = OrderedDict()
        self._tokens: Any = None

    def start(self, params: SamplingParams, position: int) -> GrammarState | None:
        """The state of a request whose tokens from `position` on follow a grammar; None if it has
        none.

        Raises:
            ValueError: llguidance refuses the source, it is too large, there is no tokenizer, or
                llguidance is not installed.
        """
        if params.constraint is None:
            return None
        matcher = self.compile(params)
        end, size = self._tokens.eos_token, self._tokens.vocab_size
        return GrammarState(matcher.deep_copy(), position, end, size)

    def compile(self, params: SamplingParams) -> Matcher:
        """A matcher before its first token. Raises ValueError as :meth:`start`."""
        assert params.constraint is not None
        kind, source = params.constraint
        with self._lock:
            found = self._compiled.get((kind, source))
            if found is None:
                try:
                    found = self._compile(kind, source)
                except ValueError as error:
                    found = error.with_traceback(None)
                self._compiled[kind, source] = found
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end((kind, source))
        if isinstance(found, ValueError):
            raise ValueError(str(found))
        return found

    def warm_up(self) -> None:
        """Read the tokenizer now, if llguidance is installed; else the first grammar does this."""
        with self._lock:
            try:
                self._read_tokenizer()
            except ValueError:  # every grammar gets this answer
                return

    def _compile(self, kind: str, source: str) -> Matcher:
        if len(source.encode()) > MAX_BYTES:
            raise ValueError(
                f"[SamplingParams] {kind} has {len(source.encode())} bytes: "
                f"expected at most {MAX_BYTES}"
            )
        self._read_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(source)
            else:
                grammar = LLMatcher.grammar_from_lark(source)
            matcher: Matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise ValueError(f"[SamplingParams] {kind}: {_line(error)}") from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest
        if matcher.is_error():
            raise ValueError(f"[SamplingParams] {kind}: {_line(matcher.get_error())}")
        return matcher

    def _read_tokenizer(self) -> None:
        """Give llguidance the vocabulary. This takes up to a second."""
        if self._tokens is not None:
            return
        if self._tokenizer is None:
            raise ValueError("[SamplingParams] a grammar is given: expected a tokenizer")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError(
                "[SamplingParams] a grammar needs llguidance: "
                "expected pip install 'mlx_paged[structured]'"
            ) from None
        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        size = max(len(inner), self._vocab_size or 0)
        self._tokens = from_tokenizer(inner, size, sorted(self._tokenizer.eos_token_ids))


def _line(error: object) -> str:
    return " ".join(str(error).split())[:400]
