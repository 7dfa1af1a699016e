"""Which tokens may follow: JSON schemas, regular expressions and grammars, by llguidance.

Only this module and grammar_trials know llguidance. It need not be installed for requests without a
grammar. Knows no mlx.
"""

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.arguments import missing, require_text
from mlx_paged.constraint import Row
from mlx_paged.sampling import grammar_trials
from mlx_paged.sampling_params import JSON_STYLE, CompilerBusy, SamplingParams

MAX_BYTES = 1 << 16  # longest source; llguidance compiles it in seconds, with Python's lock free
STACK_BYTES = 1 << 27  # of the compiler; a chain of rules in MAX_BYTES takes a third of it at most
MAX_SECONDS = 10.0  # for one source that has passed its trial
MAX_LATE = 2  # so many sources may take longer before no other one is compiled
MAX_PASSED = 1 << 16  # sources that have passed a trial and are remembered
MAX_COMPILED = 256  # compiled sources that are kept, the latest ones
MAX_KEPT = 1 << 29  # bytes that all of these may have, as `Compiled.size` estimates
MAX_STATES = 1 << 16  # of the lexer of a compiled source
SOURCE_BYTES = 250  # that a byte of a source becomes at most
TOKEN_BYTES = 20_000  # of the states that a token needs at most
STATES_BYTES = 40 << 20  # of MAX_STATES
MAX_FORCED = 1024  # tokens that are looked for at once after a token
SPECIAL = b"\xff"  # what llguidance begins the name of a special token with; no text has it

BUSY = "[SamplingParams] the compiler is busy: expected to be asked later"
TRIALS = grammar_trials.Trials()
atexit.register(TRIALS.close)

Matcher = Any  # llguidance's LLMatcher


@dataclass(slots=True)
class Compiled:
    """A compiled source. The states of its requests share what llguidance finds out about it, which
    only grows.

    Attributes:
        matcher: before its first token.
        num_bytes: of the source.
        num_followed: tokens that requests have followed.
        is_spent: llguidance has reached a limit, so that no request can follow it any more.
    """

    matcher: Matcher
    num_bytes: int
    num_followed: int = 0
    is_spent: bool = False

    @property
    def size(self) -> int:
        """Bytes that it may hold, an upper estimate."""
        return SOURCE_BYTES * self.num_bytes + min(TOKEN_BYTES * self.num_followed, STATES_BYTES)


class GrammarState:
    """The grammar of one request, after the tokens that it has.

    Where the grammar leaves one text only, its tokens are forced: those that the tokenizer makes
    of this text. Other tokens with the same text are then not allowed. So the output does not
    depend on whether the model computes these tokens one by one or all at once.

    Args:
        compiled: the source of the request.
        position: tokens of the request that do not follow the source.
        tokens: llguidance's tokenizer. Its end-of-sequence token follows when the grammar allows no
            other token.
        num_usable: the model takes ids below it; None: all.
        fast_forward: :meth:`ahead` has the forced tokens.

    Raises:
        ValueError: the grammar demands a token that the model does not have.

    Attributes:
        forced: tokens that must follow. The matcher has consumed these tokens already.
    """

    def __init__(
        self,
        compiled: Compiled,
        position: int,
        tokens: Any,
        num_usable: int | None = None,
        fast_forward: bool = True,
    ) -> None:
        self._fast_forward = fast_forward
        self.matcher = compiled.matcher.deep_copy()
        self._compiled = compiled
        self.vocab_size: int = tokens.vocab_size
        self.forced: list[int] = []
        self._position = position
        self._tokens = tokens
        self._num_usable = num_usable
        self._absent: int | None = None  # a token that must follow, and that the model lacks
        self._find_forced()
        self._require_present()

    def copy(self, tokens: Sequence[int]) -> "GrammarState":
        """The state of a fork with these tokens, which begin with those that this state has
        followed. Raises ValueError as :meth:`follow`."""
        twin = copy(self)
        twin.matcher, twin.forced = self.matcher.deep_copy(), list(self.forced)
        twin.follow(tokens)
        return twin

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on to the end of the request's `tokens`.

        Raises:
            ValueError: the grammar does not allow one of them, or demands a token that the model
                does not have; the state is then useless.
        """
        self._require_present()
        for token in tokens[self._position :]:
            if self.forced:
                is_allowed = self.forced[0] == token
            else:
                is_allowed = self.matcher.consume_token(token)
            self._compiled.num_followed += 1
            if not is_allowed:  # the position stays, so that later calls raise, too
                reason = "" if self.forced else f": {_line(self.matcher.get_error())}"
                raise ValueError(
                    f"[SamplingParams] the grammar does not allow token {token}{reason}"
                )
            self._position += 1
            if self.forced:
                del self.forced[0]
            else:
                self._find_forced()
                self._require_present()

    def ahead(self, tokens: Sequence[int]) -> list[int]:
        """The forced tokens after the request's `tokens`."""
        if not self._fast_forward:
            return []
        try:
            self.follow(tokens)
        except Exception:  # the mask of the next token reports it
            return []
        return self.forced

    @classmethod
    def masks(
        cls, rows: "Sequence[Row[GrammarState]]", vocab: int
    ) -> tuple[npt.NDArray[np.uint32], dict[int, Exception]]:
        """As :func:`masks_of`."""
        return masks_of(rows, vocab)

    def spend(self) -> None:
        """Note that the matcher has failed. Later requests follow the source compiled anew, since a
        limit that this one has reached would end them, too."""
        self._compiled.is_spent = True

    def _require_present(self) -> None:
        if self._absent is not None:
            raise ValueError(
                f"[SamplingParams] the grammar demands token {self._absent}: expected token ids "
                f"below {self._num_usable}"
            )

    def _find_forced(self) -> None:
        matcher = self.matcher
        while len(self.forced) < MAX_FORCED and (more := self._forced_tokens()):
            matcher.consume_tokens(more)
            self.forced += more
            if self._num_usable is not None and max(more) >= self._num_usable:
                self._absent = max(more)
                return
        if matcher.is_stopped() and not matcher.is_error():
            self.forced.append(self._tokens.eos_token)

    def _forced_tokens(self) -> list[int]:
        """Tokens of the text that must follow. A tokenizer makes special tokens of their names;
        such text is divided into other tokens, because a special token may end the request."""
        found: list[int] = self.matcher.compute_ff_tokens()
        if any(map(self._tokens.is_special_token, found)):
            text = self.matcher.compute_ff_bytes()
            if SPECIAL not in text:  # else the grammar itself demands a special token
                whole = text.decode(errors="ignore")  # the last character may be open
                return list(self._tokens.greedy_tokenize(whole))
        return found


def masks_of(
    rows: Sequence[Row[GrammarState]], vocab: int
) -> tuple[npt.NDArray[np.uint32], dict[int, Exception]]:
    """Let each row's state follow its tokens, and fill all masks in one call, on several threads.

    Returns what is allowed, a bit for each token ``[N, ceil(vocab / 32)]``, of these rows in their
    order; and by row of the batch why there is none.
    """
    errors: dict[int, Exception] = {}
    waiting: list[tuple[Matcher, int]] = []
    # By the id of a request's state: a copy that has followed tentative tokens so far.
    ahead: dict[int, GrammarState] = {}
    words, known = -(-vocab // 32), -(-rows[0].constraint.vocab_size // 32)
    bits = ~np.zeros((len(rows), known), np.uint32)
    for index, each in enumerate(rows):
        state = each.constraint
        try:
            if each.is_tentative:
                # The copy of the row before has followed each of these tokens except the last one.
                before = ahead.get(id(each.constraint), state)
                state = before.copy(each.tokens)
                ahead[id(each.constraint)] = state
            else:
                state.follow(each.tokens)
        except ValueError as error:
            if not each.is_tentative:  # else the model chooses another token than this one
                state.spend()
                errors[each.row] = error.with_traceback(None)
            continue
        # If the request is ahead, the engine has appended forced tokens already.
        coming = each.tokens[each.length :] or state.forced
        if coming:
            bits[index] = 0
            bits[index, coming[0] // 32] = 1 << coming[0] % 32
        else:
            waiting.append((state.matcher, index))
    if waiting:
        _executor().unsafe_compute_mask_ptr(waiting, bits.ctypes.data, bits.strides[0], len(bits))
    for matcher, index in waiting:
        if matcher.is_error() and not rows[index].is_tentative:
            rows[index].constraint.spend()
            reason = f"[SamplingParams] the grammar failed: {_line(matcher.get_error())}"
            errors[rows[index].row] = ValueError(reason)
    if words > known:  # the logits are wider
        bits = np.pad(bits, ((0, 0), (0, words - known)))
    bits = bits[:, :words]
    if vocab % 32:
        bits[:, -1] &= (1 << vocab % 32) - 1
    return bits, errors


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


class Grammars:
    """The grammars of one tokenizer, compiled once each. Any thread may call it.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper, or None.
        vocab_size: columns of the model's logits; None: as many as the tokenizer has tokens.
        num_usable: the model takes ids below it; None: all.
        fast_forward: requests get forced tokens at once, and the next step computes them together.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int | None,
        num_usable: int | None = None,
        fast_forward: bool = True,
    ) -> None:
        self.fast_forward = fast_forward
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_usable = num_usable
        self._lock = threading.Lock()  # one source at a time: others keep their processors
        self._compiled: dict[tuple[str, str], Compiled | ValueError] = {}  # oldest first
        self._passed = set[bytes]()  # digests of sources that took little in a process apart
        self._tokens: Any = None
        self._late: list[threading.Thread] = []  # that compile for too long

    def start(self, params: SamplingParams, position: int) -> GrammarState | None:
        """The state of a request whose tokens from `position` on follow a grammar; None if it has
        none.

        Raises:
            ValueError: llguidance refuses the source, it is too large, there is no tokenizer, or
                llguidance is not installed.
            CompilerBusy: other sources keep the compiler busy.
        """
        if params.constraint is None:
            return None
        compiled = self.compile(params)
        return GrammarState(
            compiled, position, self._tokens, self._num_usable, fast_forward=self.fast_forward
        )

    def compile(self, params: SamplingParams) -> Compiled:
        """The compiled source of `params`. Raises ValueError as :meth:`start`."""
        assert params.constraint is not None
        kind, source = params.constraint
        require_text("SamplingParams", kind, source)
        if (size := len(source.encode())) > MAX_BYTES:
            most = f"expected at most {MAX_BYTES}"
            raise ValueError(f"[SamplingParams] {kind} has {size} bytes: {most}")
        found = self._known(kind, source)  # no lock: another source may take seconds
        if found is None:
            refusal = self._tried(kind, source)
            with self._lock:
                found = self._known(kind, source)
                if found is None:
                    try:
                        found = refusal or Compiled(self._compile(kind, source), size)
                    except ValueError as error:
                        found = error.with_traceback(None)
                    self._keep((kind, source), found)
        if isinstance(found, ValueError):
            raise ValueError(str(found))
        return found

    def _known(self, kind: str, source: str) -> Compiled | ValueError | None:
        found = self._compiled.get((kind, source))
        return None if isinstance(found, Compiled) and found.is_spent else found

    def _keep(self, key: tuple[str, str], new: Compiled | ValueError) -> None:
        """Keep a source as the latest one, and let go of the oldest ones beyond the limits. Those
        that requests follow stay in memory until these have ended."""
        self._compiled.pop(key, None)
        self._compiled[key] = new
        sizes = [each.size if isinstance(each, Compiled) else 0 for each in self._compiled.values()]
        total = sum(sizes)
        for size, old in zip(sizes, list(self._compiled), strict=True):
            if old == key or (total <= MAX_KEPT and len(self._compiled) <= MAX_COMPILED):
                break
            total -= size
            del self._compiled[old]

    def knows(self, params: SamplingParams) -> bool:
        """Whether :meth:`compile` returns a matcher at once."""
        return params.constraint is not None and isinstance(
            self._known(*params.constraint), Compiled
        )

    def _tried(self, kind: str, source: str) -> ValueError | None:
        """Why a source is refused that takes too much in a process apart; None if it does not, or
        if another reason will be found. A source that has passed does not wait again."""
        passed = sha256(f"{kind}:{source}".encode()).digest()
        if passed in self._passed or self._tokenizer is None or find_spec("llguidance") is None:
            return None
        try:
            TRIALS.check(kind, source)
        except grammar_trials.Refused as error:
            return ValueError(f"[SamplingParams] {kind}: {error}")
        except grammar_trials.Busy:
            raise CompilerBusy(BUSY) from None
        if len(self._passed) >= MAX_PASSED:
            self._passed.clear()
        self._passed.add(passed)
        return None

    def warm_up(self) -> None:
        """Read the tokenizer now, if llguidance is installed; else the first grammar does this."""
        with self._lock, suppress(ValueError):  # every grammar gets this answer
            self._read_tokenizer()

    def _compile(self, kind: str, source: str) -> Matcher:
        self._read_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_STATES)
        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
            else:
                name = {"regex": "regex", "grammar": "lark"}[kind]
                grammar = getattr(LLMatcher, f"grammar_from_{name}")(source)
            make = partial(LLMatcher, self._tokens, grammar, log_level=0, limits=limits)
            matcher = self._in_time(make)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except ValueError as error:
            raise ValueError(f"[SamplingParams] {kind}: {_line(error)}") from None
        return matcher

    def _in_time(self, make: Callable[[], Matcher]) -> Matcher:
        """Call llguidance's compiler on a deep stack: it recurses along chains of rules. Some of
        its loops have no limit and cannot be stopped; such a thread is left alone."""
        found: list[Matcher] = []
        self._late = [thread for thread in self._late if thread.is_alive()]
        if len(self._late) == MAX_LATE:
            raise CompilerBusy(BUSY)

        def run() -> None:
            matcher = make()
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask takes longest
            found.append(matcher)

        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join(MAX_SECONDS)
        if found:
            return found[0]
        self._late.append(thread)
        reason = f"takes more than {MAX_SECONDS:g} s" if thread.is_alive() else "failed"
        raise ValueError(f"the compiler {reason}")

    def _read_tokenizer(self) -> None:
        """Give llguidance the vocabulary. This takes up to a second."""
        if self._tokens is not None:
            return
        if self._tokenizer is None:
            raise ValueError("[SamplingParams] a grammar is given: expected a tokenizer")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            reason = missing("llguidance", "structured")
            raise ValueError(f"[SamplingParams] a grammar is given, but {reason}") from None
        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        size = max(len(inner), self._vocab_size or 0)
        ends = sorted(self._tokenizer.eos_token_ids)
        usable = [end for end in ends if self._num_usable is None or end < self._num_usable]
        self._tokens = from_tokenizer(inner, size, usable or ends)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:400]
