"""The token ids of a rendered chat: names of control tokens in its messages are plain text."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer

from mlx_paged.chat.marks import Names, divided, names_of, spare


def encoded(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The token ids of a text.

    Args:
        tokenizer: of mlx-lm, or of transformers.
        text: of a chat, a :class:`mlx_paged.chat.marks.Rendered`, or any other.
        options: arguments of the tokenizer's ``encode``.
    """
    if not getattr(text, "cuts", ()):
        return list(tokenizer.encode(text, **options))
    tokens = _with_aliases(tokenizer, text, **options)
    if tokens is None:
        tokens = _without_marks(tokenizer, text, **options)
    return _in_pieces(tokenizer, text, **options) if tokens is None else tokens


class _Aliases(NamedTuple):
    """A tokenizer that knows control tokens by other names.

    Attributes:
        character: each alias begins and ends with this character.
        names: of the control tokens.
        backend: the tokenizer.
        alias_of: the aliases, by the names.
        id_of: the token ids that the ids of added tokens of `backend` stand for.
        known: ids of control tokens that plain text can have in this tokenizer.
    """

    character: str
    names: Names
    backend: Tokenizer
    alias_of: Mapping[str, str]
    id_of: Mapping[int, int]
    known: frozenset[int]


_ALIASES: "WeakKeyDictionary[Any, _Aliases]" = WeakKeyDictionary()


def _with_aliases(
    tokenizer: Any, text: str, add_special_tokens: bool = True, **options: Any
) -> list[int] | None:
    """The token ids of a text as if the tokenizer knew no control token by the names that the text
    divides; None: this tokenizer cannot be asked so."""
    if options or not _is_plain(tokenizer):
        return None
    mark = spare([text])
    aliases = _aliases(tokenizer, spare([text, mark]))
    if aliases is None:
        return None
    whole = aliases.names.found.sub(
        lambda name: aliases.alias_of.get(name[0], name[0]), divided(text, mark)
    )
    made = aliases.backend.encode(whole.replace(mark, ""), add_special_tokens=add_special_tokens)
    pairs = list(zip(made.ids, made.special_tokens_mask, strict=True))
    if any(token in aliases.known and not is_added for token, is_added in pairs):
        return None
    return [token if is_added else aliases.id_of.get(token, token) for token, is_added in pairs]


def _is_plain(tokenizer: Any) -> bool:
    """Whether `encode` is that of transformers for every tokenizer of Rust."""
    base = "transformers.tokenization_utils"
    methods = (getattr(tokenizer, name, None) for name in ("encode", "_encode_plus"))
    return hasattr(tokenizer, "backend_tokenizer") and all(
        str(getattr(each, "__module__", "")).startswith(base) for each in methods
    )


def _aliases(tokenizer: Any, character: str) -> _Aliases | None:
    names, known = names_of(tokenizer), _ALIASES.get(tokenizer)
    if known is None or known.character != character or known.names != names:
        known = _made(tokenizer.backend_tokenizer, character, names)
        if known is not None:
            _ALIASES[tokenizer] = known
    return known


def _made(own: Tokenizer, character: str, names: Names) -> _Aliases | None:
    """A tokenizer with the model of `own`; None: ids of aliases would be those of other tokens."""
    made = Tokenizer(own.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor"):
        if (part := getattr(own, step)) is not None:
            setattr(made, step, part)
    made.encode_special_tokens = own.encode_special_tokens
    alias_of, id_of, known = dict[str, str](), dict[int, int](), set[int]()
    for token, added in sorted(own.get_added_tokens_decoder().items()):
        content = added.content
        if content in names.all:
            alias_of[content] = content = f"{character}{token}{character}"
            known.update([token] if own.model.id_to_token(token) is not None else ())
        made.add_tokens([_renamed(added, content)])
        number = made.token_to_id(content)
        if number is None or (number != token and own.model.id_to_token(number) is not None):
            return None
        id_of[number] = token
    return _Aliases(character, names, made, alias_of, id_of, frozenset(known))


def _renamed(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _without_marks(tokenizer: Any, text: str, **options: Any) -> list[int] | None:
    """The token ids of a text with a mark at each cut, without those of the marks; None: they are
    not to be told from others."""
    mark = spare([text])
    tokens = list(tokenizer.encode(divided(text, mark), **options))
    places = mark_places(tokenizer, mark, tokens)
    if len(places) != len(getattr(text, "cuts", ())):
        return None
    left_out = {at for place in places for at in place}
    return [token for at, token in enumerate(tokens) if at not in left_out]


def mark_places(tokenizer: Any, mark: str, tokens: Sequence[int]) -> list[range]:
    """Where the tokens of marks are; none if a mark has no tokens of its own."""
    alone = list(tokenizer.encode("x", add_special_tokens=False))
    both = list(tokenizer.encode(f"x{mark}", add_special_tokens=False))
    run = both[len(alone) :]
    found = list[range]()
    at = 0
    if not run or both[: len(alone)] != alone:
        return []
    while True:
        try:
            at = tokens.index(run[0], at)
        except ValueError:
            return found
        is_mark = list(tokens[at : at + len(run)]) == run
        if is_mark:
            found.append(range(at, at + len(run)))
        at += len(run) if is_mark else 1


def _in_pieces(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The token ids of the pieces of a text between its cuts."""
    mark = spare([text])
    first, *others = divided(text, mark).split(mark)
    tokens = list(tokenizer.encode(first, **options))
    for piece in others:
        tokens += tokenizer.encode(piece, **options | {"add_special_tokens": False})
    return tokens
