"""Random tokens, and the text that a tokenizer's own `decode` makes of them."""

import random
from collections.abc import Iterator, Sequence
from os.path import commonprefix

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.spelling import spelling_of
from tests.support.models.tokenizers import CORPUS


def token_pools(tokenizer: TokenizerWrapper) -> list[Sequence[int]]:
    """Tokens to draw from: all of the vocabulary and a few ids beyond, tokens of one byte or
    character, and tokens of texts."""
    ids = range(len(tokenizer) + 3)
    names = [tokenizer.convert_ids_to_tokens(token) or "" for token in ids]
    short = [i for i, name in enumerate(names) if len(name) == 1 or name.startswith("<0x")]
    texts = [token for text in CORPUS for token in tokenizer.encode(text)]
    return [ids, short, texts]


def random_cases(
    tokenizer: TokenizerWrapper, seed: str, count: int, longest: int = 40
) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of a prompt's tokens, which have a text, and of tokens after the prompt."""
    rng, pools = random.Random(seed), token_pools(tokenizer)
    for _ in range(count):
        pool = rng.choice(pools)
        sizes = rng.randrange(12), rng.randrange(1, longest)
        prompt, tokens = ([rng.choice(pool) for _ in range(size)] for size in sizes)
        prompt.insert(0, tokenizer.encode("x", add_special_tokens=False)[-1])
        if rng.random() < 0.3 and pool is pools[2]:  # a piece of a text, in its order
            start = rng.randrange(len(pool))
            tokens = list(pool[start : start + sizes[1]])
        yield prompt, tokens


def expected_text(tokenizer: TokenizerWrapper, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """`decode(prompt + tokens)` from where it departs from `decode(prompt)`."""
    before, whole = (tokenizer.decode(list(ids)) for ids in (prompt, [*prompt, *tokens]))
    return str(whole[len(commonprefix((before, whole))) :])  # noqa: RUF071, of characters


def streamed(
    tokenizer: TokenizerWrapper, prompt: Sequence[int], tokens: Sequence[int]
) -> list[str]:
    """The text after a prompt in the pieces that become certain with each token, and the rest."""
    text = spelling_of(tokenizer).text(prompt, keeps_space=True)
    return [*map(text.push, tokens), text.finish()]
