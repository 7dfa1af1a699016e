"""Requests with grammars on the demo model, and what they have to yield alone."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
from jsonschema import validate
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mlx_paged.kv.layer_groups import ONE_GROUP
from mlx_paged.loading import load_model
from mlx_paged.options import KVBits
from mlx_paged.sampling_params import JSON_STYLE, SamplingParams
from tests.support.random_schemas import random_schema
from tests.support.simulation.random_calls import Setting
from tests.support.simulation.solo_runs import MlxLmSolo

Mask = Callable[[Sequence[int]], npt.NDArray[np.bool_]]
SCHEMAS = [json.dumps(random_schema(index)) for index in (0, 3, 5, 9, 12, 14)]
SCHEMAS.append('{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}')
SCHEMAS.append('{"enum": ["red", "green", {"k": 0}]}')
CONSTRAINTS = [{"json_schema": schema} for schema in SCHEMAS]


def structured_setting(rng: random.Random) -> Setting:
    """A setting in which schemas come to an end, in batches of up to 16."""
    setting = Setting.drawn(rng, small=True)
    most = rng.choice((8, 40, 80))
    needed = -(-(setting.longest_prompt + most) // setting.block_size)
    return replace(
        setting,
        groups=ONE_GROUP,
        recurrent=False,
        most_tokens=most,
        num_blocks=int(needed * rng.choice((1, 1.5, 3, 8))),
        max_running=rng.choice((3, 8, 16)),
        num_arrivals=rng.randint(1, 16),
    )


class StructuredSolo(MlxLmSolo):
    """The demo model, run by mlx-lm: mask, then choose."""

    def __init__(self, kv_bits: KVBits = None) -> None:
        model, self.tokenizer = load_model()
        super().__init__(model, model.args.vocab_size, kv_bits)
        self.ends = frozenset(self.tokenizer.eos_token_ids)
        self._tokens = from_tokenizer(self.tokenizer._tokenizer, self.vocab, sorted(self.ends))

    def mask(self, params: SamplingParams, begun: Sequence[int]) -> Mask | None:
        if params.json_schema is None:
            return None
        source = LLMatcher.grammar_from_json_schema(params.json_schema, defaults=JSON_STYLE)
        matcher, seen, forced = LLMatcher(self._tokens, source, log_level=0), 0, list[int]()

        def allowed(tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
            """Of the token that follows `begun` and these; none if one of them is not allowed."""
            nonlocal seen
            for token in [*begun, *tokens][seen:]:
                seen += 1
                if token in self.ends and matcher.is_stopped():
                    continue
                is_right = forced[0] == token if forced else matcher.consume_token(token)
                forced[:1] = []
                if not is_right:
                    return np.zeros(self.vocab, bool)
                force()
            if not forced and not matcher.is_stopped():
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                return np.unpackbits(bits, count=self.vocab, bitorder="little").astype(bool)
            first = forced[0] if forced else min(self.ends)
            return np.arange(self.vocab) == first

        def force() -> None:
            if not forced:
                forced.extend(matcher.compute_ff_tokens())
                matcher.consume_tokens(forced)

        force()
        return allowed

    def check(self, params: SamplingParams, tokens: Sequence[int]) -> bool:
        """Whether the text is complete; AssertionError, or jsonschema's, if it is not valid."""
        super().check(params, tokens)
        if params.json_schema is None or not tokens or tokens[-1] not in self.ends:
            return False
        text = self.tokenizer.decode([token for token in tokens if token not in self.ends])
        validate(json.loads(text), json.loads(str(params.json_schema)))
        return True


@cache
def structured_solo(kv_bits: KVBits = None) -> StructuredSolo:
    """One for all schedules."""
    return StructuredSolo(kv_bits)
