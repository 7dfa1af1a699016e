"""Random engines and what their callers ask for, all of it drawn from one random stream."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_paged.kv.layer_groups import ONE_GROUP, LayerGroup
from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.prompt import Prompt
from mlx_paged.sampling_params import SamplingParams
from tests.support.simulation.fault_injection import FailingProcessor
from tests.support.simulation.solo_runs import BeamOptions


@dataclass(frozen=True)
class Setting:
    """An engine, and what it is going to meet.

    Attributes:
        max_stall: seconds.
        recurrent: the model keeps a state beside its K/V.
        most_snapshots: of it are kept at most.
        fault_rate: probability that a step fails, whatever is in it.
        bad_rate: probability that a request, or its processor, fails at some length.
        num_arrivals: calls that add something.
    """

    groups: tuple[LayerGroup, ...]
    num_blocks: int
    block_size: int
    prefill_chunk: int
    max_running: int
    policy: Policy
    victims: PreemptionPolicy
    max_stall: float | None
    watermark: int
    lookahead: bool
    prefix_cache: bool
    recurrent: bool
    fault_rate: float
    bad_rate: float
    num_arrivals: int
    longest_prompt: int
    most_tokens: int
    most_snapshots: int

    @classmethod
    def drawn(cls, rng: random.Random, small: bool) -> "Setting":
        """A random one; a small one can be run on a real model."""
        block_size = rng.choice((1, 2, 3, 4, 8))
        longest = rng.choice((6, 20)) if small else rng.choice((4, 12, 40))
        most_tokens = rng.choice((3, 8)) if small else rng.choice((1, 4, 16))
        needed = -(-(longest + most_tokens) // block_size)
        recurrent = rng.random() < 0.25
        groups = ONE_GROUP
        if not (recurrent and small) and rng.random() < 0.5:
            groups = TINY_GROUPS if small else drawn_groups(rng, block_size)
        entries = max(1, int(needed * rng.choice((0.5, 1, 1.5, 3, 8))))
        return cls(
            groups=groups,
            num_blocks=entries * sum(group.width for group in groups),
            block_size=block_size,
            prefill_chunk=rng.choice((1, 2, 5, 16, 64)),
            max_running=rng.choice((1, 2, 3, 8)),
            policy=rng.choice(tuple(Policy)),
            victims=rng.choice(tuple(PreemptionPolicy)),
            max_stall=rng.choice((None, 0.0012, 0.0016, 0.003)),
            watermark=rng.choice((0, 0, 1, 3)),
            lookahead=rng.random() < 0.8,
            prefix_cache=rng.random() < 0.8,
            recurrent=recurrent,
            fault_rate=rng.choice((0.0, 0.0, 0.0, 0.02, 0.1)),
            bad_rate=rng.choice((0.0, 0.0, 0.1)),
            num_arrivals=rng.randint(1, 10 if small else 20),
            longest_prompt=longest,
            most_tokens=most_tokens,
            most_snapshots=rng.choice((1, 2, 5, 100)),
        )

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether the pool can hold such a request; its last token needs no slot."""
        num_tokens, size = num_prompt + max_tokens - 1, self.block_size
        needed = 0
        for group in self.groups:
            kept = num_tokens
            if group.window is not None:
                kept = min(num_tokens, group.window + self.prefill_chunk + 2 * size)
            needed += group.members * group.pieces * -(-kept // size)
        return needed <= self.num_blocks


PLACE = 0
"""The token of an image."""
FIRST_KEY = 1 << 62
"""Keys of images are not below it."""

TINY_GROUPS = LayerGroup(), LayerGroup(4, 2)
"""Those of a tiny model with a layer that sees all tokens and two that see the last four."""


def drawn_groups(rng: random.Random, block_size: int) -> tuple[LayerGroup, ...]:
    """Layers that see all tokens, and layers that see the last few."""
    pieces = rng.choice([n for n in (1, 1, 2, 4) if block_size % n == 0])
    members, others = rng.choice(((1, 1), (1, 1), (1, 3), (2, 1), (1, 5)))
    return (
        LayerGroup(None, members, 1),
        LayerGroup(rng.choice((1, 2, 3, 5, 9)), others, pieces),
    )


class RandomCalls:
    """What callers ask for.

    Args:
        constraints: options of which most requests have one; beams have none.
        images: most prompts have images of a few kinds. The tokens of all images are the same;
            their keys are not, and the model of hashes reads keys.
        forks, beams: whether there are any.

    Attributes:
        histories: salts and keys of requests, which later prompts begin with.
    """

    def __init__(
        self,
        setting: Setting,
        rng: random.Random,
        vocab: int,
        constraints: Sequence[Mapping[str, str]] = (),
        images: bool = False,
        forks: bool = True,
        beams: bool = True,
    ) -> None:
        self.setting = setting
        self.rng = rng
        self.vocab = vocab
        self.constraints = constraints
        self.images = images
        self.kinds = ("request",) * 3 + ("fork",) * 2 * forks + ("samples",) + ("beams",) * beams
        self._of_caches = random.Random(str(setting))  # leaves the other draws as they are
        self.histories: list[tuple[str, list[int]]] = []

    def prompt(self) -> tuple[list[int], str]:
        """New tokens, or the beginning of what an earlier request had and more; and a salt."""
        rng, longest = self.rng, self.setting.longest_prompt
        salt, known = rng.choice(("", "", "", "tenant")), list[int]()
        if self.histories and rng.random() < 0.6:
            salt, known = rng.choice(self.histories)
            salt = salt if rng.random() < 0.7 else ""
            length = len(known) if rng.random() < 0.5 else rng.randint(0, len(known))
            known = known[: min(length, longest - 1)]
        num_new = 1 if rng.random() < 0.1 else rng.randint(1, longest - len(known))
        keys = known + self._keys(num_new)
        self.histories.append((salt, keys))
        if max(keys) < FIRST_KEY:
            return keys, salt
        tokens = [PLACE if key >= FIRST_KEY else key for key in keys]
        if rng.random() < 0.2:  # the same tokens, without an image
            return tokens, salt
        places = np.array([key >= FIRST_KEY for key in keys])
        spans: Any = SimpleNamespace(keys=keys, features=places)
        return Prompt(tokens, spans), salt

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def turn_ends(self, prompt: list[int]) -> list[int]:
        """Where states are to be kept, in some requests of models that have any."""
        if not self.setting.recurrent:
            return []
        return [self.rng.randint(0, len(prompt)) for _ in range(self.rng.choice((0, 0, 1, 3)))]

    def _keys(self, count: int) -> list[int]:
        """Those of new tokens of a prompt."""
        keys = self.tokens(count)
        if self.images and self.rng.random() < 0.6:
            start, image = self.rng.randrange(count), self.rng.randrange(3)
            size = len(keys[start : start + self.rng.choice((1, 3, 8))])
            keys[start : start + size] = [FIRST_KEY + 2 * image + i % 2 for i in range(size)]
        return keys

    def params(self, num_prompt: int) -> SamplingParams:
        """Greedy or not, with or without a seed, and maybe with a processor that fails."""
        rng, setting = self.rng, self.setting
        retain = self._of_caches.choice((None, None, 0, 1e-3, 5, "pin", "drop"))
        failing = FailingProcessor(num_prompt + rng.randint(0, setting.most_tokens))
        params = SamplingParams(
            max_tokens=rng.randint(1, setting.most_tokens),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            seed=rng.randrange(2**64) if rng.random() < 0.5 else None,
            stop_token_ids=self._stop_token_ids(),
            logprobs=rng.choice((0, 0, 2, 9)),
            retain=retain,
            logits_processors=(failing,) if rng.random() < setting.bad_rate else (),
        )
        if not self.constraints:
            return params
        if rng.random() < 0.3:
            return replace(params, ignore_eos=True)
        constraint: Mapping[str, Any] = rng.choice(self.constraints)
        return replace(params, logits_processors=(), **constraint)

    def control(self, engine: Any) -> str:
        """Pin or forget a text of before, at times; says which."""
        rng = self._of_caches
        if not self.histories or rng.random() < 0.7:
            return ""
        salt, keys = rng.choice(self.histories)
        tokens = [key for key in keys if key < FIRST_KEY]
        if tokens and rng.random() < 0.6:
            engine.pin(tokens, seconds=rng.choice((None, 0, 1e-3, 60)), cache_salt=salt)
            return "pins"
        engine.forget(rng.choice((tokens or None, None)), cache_salt=salt)
        return "forgets"

    def beams(self) -> tuple[SamplingParams, BeamOptions]:
        rng = self.rng
        max_tokens = rng.randint(1, min(5, self.setting.most_tokens))
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids(),
            ignore_eos=bool(self.constraints),
        )
        penalty = rng.choice((-1.0, 0.0, 1.0, 2.0))
        most = min(4, self.setting.num_blocks)  # as the engine asks where it knows no vocabulary
        return params, BeamOptions(rng.randint(1, most), penalty, rng.random() < 0.5)

    def breaking_length(self, num_prompt: int, max_tokens: int) -> int | None:
        """Tokens, prompt included, from which on every step with a request fails."""
        if self.rng.random() >= self.setting.bad_rate:
            return None
        return num_prompt + self.rng.randint(-3, max_tokens)

    def _stop_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokens(self.rng.choice((0, 0, 1, 3))))


def keys_of(prompt: list[int]) -> list[int]:
    """What the model of hashes reads."""
    return prompt.image_spans.keys if isinstance(prompt, Prompt) else prompt
