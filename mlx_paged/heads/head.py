"""What a head is: a small module that guesses the next tokens of a model, the target, from the
target's hidden states."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

NORMED = -1  # in `Head.states`: the output of the target's final norm


class Head(nn.Module):
    """A head of a target. Each kind of head is a subclass.

    The head computes entries. The entry of position p, from 1 on, is made of the target's states of
    position p - 1 and of the token at position p. It guesses the token at position p + 1. Its K/V
    depends on the tokens up to p alone, as the target's K/V at position p does.

    The first guess of a step has states of the target. To guess a further token the head is applied
    to its own guess: :meth:`feed_back` of the hidden state of the entry before stands in the place
    of the target's states. When the target has computed these tokens, their entries are computed
    again, with the target's states.

    The head's layers are called with caches of the engine. Their attention is mlx-lm's
    ``scaled_dot_product_attention`` on what ``update_and_fetch`` returns, as in mlx-lm's models.
    Positions, for RoPE, come from ``cache.offset``. They count from the first entry that the head
    has of a sequence, so only differences of positions may matter.

    Sizes: `B` and `L` are the two leading axes, whatever they mean; `D` is the width of the head.

    Attributes:
        states: the states of the target that the head reads. j >= 0: the input of layer j, which is
            the output of layer j - 1; the number of layers: the output of the last layer, before
            the final norm. :data:`NORMED`: the output of the final norm.
        layers: the layers with K/V, each with a cache of its own.
        target_ids: ``[V]`` int32, the target's id of each token that the head can guess; None: the
            head has the target's vocabulary.
    """

    states: tuple[int, ...]
    layers: list[nn.Module]
    target_ids: mx.array | None = None

    def bind(self, target: nn.Module) -> None:
        """Share the target's embeddings and output projection, as far as the head has none of its
        own. What is shared is not a part of the head's module tree: it has no weights twice.

        Raises:
            ValueError: the head is not one of this model. It names what differs.
        """
        raise NotImplementedError

    def make_cache(self) -> list[KVCache]:
        """A cache for each of `layers`, of one sequence."""
        return [KVCache() for _ in self.layers]

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings ``[B, L, E]`` of the target's token ids ``[B, L]``."""
        raise NotImplementedError

    def fuse(self, states: list[mx.array]) -> mx.array:
        """What an entry takes of the target: the states, each ``[B, L, ...]`` as the target has it
        and in the order of `states`, as one array ``[B, L, ...]``."""
        raise NotImplementedError

    def __call__(self, fused: mx.array, embeddings: mx.array, cache: list[KVCache]) -> mx.array:
        """Hidden states ``[B, L, ...]`` of entries.

        Args:
            fused: what :meth:`fuse` or :meth:`feed_back` returned for the positions before.
            embeddings: of the entries' tokens.
            cache: of each layer.
        """
        raise NotImplementedError

    def feed_back(self, hidden: mx.array) -> mx.array:
        """What stands in the place of :meth:`fuse`'s result for the next entry, of the same shape,
        if `hidden` is what the call returned."""
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits ``[B, L, V]`` of the guesses, over the tokens of `target_ids`."""
        raise NotImplementedError
