"""What a request has to yield, computed for it alone: no cache, no batch, no blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.options import KVBits
from mlx_paged.request import FinishReason
from mlx_paged.sampling.sampler import uniform
from mlx_paged.sampling_params import SamplingParams
from tests.support.ops.numpy_quantization import quantized_mlx_lm
from tests.support.simulation import hash_model
from tests.support.simulation.hash_model import allowed

Logprobs = Callable[[list[int]], npt.NDArray[np.float64]]


class Solo(NamedTuple):
    """A request's tokens, why it ends, and by how little another token was missed each time."""

    tokens: list[int]
    margins: list[float]
    reason: FinishReason


NEAR_TIE = 1e-4
"""Two tokens this close may change places where a kernel sums in another order."""

QUANTIZED_NEAR_TIE = 2e-2
"""The same where K/V is quantized: K/V that differs in the last bit may be rounded apart."""


class SoloModel(Protocol):
    """A model that runs requests alone."""

    vocab: int
    near_tie: float
    ends: frozenset[int]

    def tokens(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        salt: bytes,
        begun: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        """``params.max_tokens`` tokens and their margins. The grammar goes on after `begun`."""

    def logprobs(self, salt: bytes) -> Logprobs:
        """Log-probabilities of what comes after given tokens."""

    def allows(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        """Whether the text of a request may begin with these tokens."""

    def check(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        """Whether the text is one that `params` restrict and complete; AssertionError if it is not
        allowed."""


def solo_run(
    model: SoloModel,
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    salt: bytes,
    begun: Sequence[int] = (),
) -> Solo:
    """The request on its own, up to its first stop token."""
    tokens, margins = model.tokens(prompt, params, seed, salt, begun)
    ends = params.stop_token_ids | (frozenset() if params.ignore_eos else model.ends)
    for index, token in enumerate(tokens):
        if token in ends:
            return Solo(tokens[: index + 1], margins[: index + 1], FinishReason.STOP)
    return Solo(tokens, margins, FinishReason.LENGTH)


class FakeSolo:
    """The model of hashes on plain lists."""

    vocab = hash_model.VOCAB
    near_tie = NEAR_TIE
    ends = frozenset[int]()

    def tokens(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        salt: bytes,
        begun: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        tokens = list(prompt)
        context = hash_model.context_of(tokens, salt)
        for index in range(params.max_tokens):
            may_follow = allowed(params, [*begun, *tokens[len(prompt) :]])
            token = hash_model.next_token(context, params, seed, index, may_follow)
            kv = hash_model.kv_of(context, token, len(tokens))
            context = hash_model.extended(context, kv, len(tokens))
            tokens.append(token)
        return tokens[len(prompt) :], [np.inf] * params.max_tokens

    def logprobs(self, salt: bytes) -> Logprobs:
        return lambda tokens: hash_model.logprobs_of(hash_model.context_of(tokens, salt))

    def allows(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        masks = [allowed(params, tokens[:index]) for index in range(len(tokens))]
        pairs = zip(masks, tokens, strict=True)
        return all(mask is None or bool(mask[token]) for mask, token in pairs)

    def check(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        assert self.allows(params, tokens), "no prefix of a valid text"
        return params.constraint is not None


class MlxLmSolo:
    """A real model, run by mlx-lm."""

    ends = frozenset[int]()

    def __init__(self, model: nn.Module, vocab: int, kv_bits: KVBits = None) -> None:
        self.model = model
        self.vocab = vocab
        self.kv_bits = kv_bits
        self.near_tie = NEAR_TIE if kv_bits is None else QUANTIZED_NEAR_TIE

    def mask(
        self, params: SamplingParams, begun: Sequence[int]
    ) -> Callable[[Sequence[int]], npt.NDArray[np.bool_]] | None:
        """Which tokens may follow given ones, if `params` restrict them."""
        return None

    def allows(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        mask = self.mask(params, tokens)
        return mask is None or bool(mask(()).any())

    def check(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        assert self.allows(params, tokens), "no prefix of a valid text"
        return False

    def tokens(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        salt: bytes,
        begun: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        margins: list[float] = []
        picked: list[int] = []
        mask = self.mask(params, begun)

        def sampler(logprobs: mx.array) -> mx.array:
            row = np.array(logprobs[0], np.float64)
            if mask is not None:
                row[~mask(picked)] = -np.inf
            draw = uniform([seed], [len(margins)])[0] if params.temperature > 0 else None
            token, margin = _pick(row, params.temperature, draw)
            margins.append(margin)
            picked.append(token)
            return mx.array([token], mx.uint32)

        with quantized_mlx_lm(self.kv_bits):
            steps = generate_step(
                mx.array(prompt), self.model, max_tokens=params.max_tokens, sampler=sampler
            )
            tokens = [int(token) for token, _ in steps]
        return tokens, margins[: len(tokens)]

    def logprobs(self, salt: bytes) -> Logprobs:
        def of(tokens: list[int]) -> npt.NDArray[np.float64]:
            with quantized_mlx_lm(self.kv_bits):
                cache = None if self.kv_bits is None else make_prompt_cache(self.model)
                rows = self.model(mx.array([tokens]), cache=cache)
            logits = np.array(rows[0, -1], np.float64)
            shifted = logits - logits.max()
            return shifted - np.log(np.exp(shifted).sum())

        return of


def _pick(
    logprobs: npt.NDArray[np.float64], temperature: float, draw: np.float32 | None
) -> tuple[int, float]:
    """A token and the distance to choosing another one."""
    if draw is None:
        second, first = np.sort(logprobs)[-2:]
        return int(logprobs.argmax()), float(first - second)
    cumulated = np.cumsum(np.exp((logprobs - logprobs.max()) / temperature))
    cumulated /= cumulated[-1]
    token = int(np.searchsorted(cumulated, draw, side="right"))
    return token, float(np.abs(cumulated - draw).min())


@dataclass(frozen=True)
class BeamOptions:
    """The options of a beam search."""

    num_beams: int
    length_penalty: float
    early_stopping: bool


class _Beam(NamedTuple):
    total: float
    tokens: list[int]


def plain_beam_search(
    logprobs: Logprobs,
    prompt: Sequence[int],
    params: SamplingParams,
    options: BeamOptions,
    preferred: Sequence[Sequence[int]] = (),
    margin: float = 0.0,
) -> list[list[int]]:
    """The best hypotheses' tokens, best first, looking at every token of the vocabulary and going
    on for as long as it may make a difference, `options.early_stopping` apart. A hypothesis that
    one of the `preferred` ones begins with wins against better ones within the `margin`."""

    def rank(beam: _Beam) -> float:
        tokens = beam.tokens
        is_preferred = any(tokens == [*each[: len(tokens)]] for each in preferred)
        return -beam.total - (margin if is_preferred else 0.0)

    width = options.num_beams
    live = [_Beam(0.0, [])]
    finished: list[_Beam] = []
    for length in range(1, params.max_tokens + 1):
        pool: list[_Beam] = []
        for beam in live:
            row = logprobs([*prompt, *beam.tokens])
            order = np.argsort(-row, kind="stable").tolist()
            pool += [_Beam(beam.total + float(row[t]), [*beam.tokens, t]) for t in order]
        pool.sort(key=rank)
        ends = [beam.tokens[-1] in params.stop_token_ids for beam in pool]
        finished += [beam for beam, end in zip(pool[:width], ends, strict=False) if end]
        live = [beam for beam, end in zip(pool, ends, strict=True) if not end][:width]
        if options.early_stopping and len(finished) >= width:
            break
        if length == params.max_tokens:
            finished += live
    finished.sort(key=lambda beam: rank(beam) / len(beam.tokens) ** options.length_penalty)
    return [beam.tokens for beam in finished[:width]]


def beam_score(
    logprobs: Logprobs, prompt: Sequence[int], tokens: Sequence[int], options: BeamOptions
) -> float:
    """The score of a hypothesis."""
    rows = [logprobs([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens)]
    return float(sum(rows)) / len(tokens) ** options.length_penalty
