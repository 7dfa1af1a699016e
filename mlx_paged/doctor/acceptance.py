"""How often guessed tokens (drafts) are accepted, and tokens with drafts against mlx-lm's."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.doctor import common, tokens
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.tokens import Calm, Play
from mlx_paged.engine.engine import Engine

MAX_TOKENS = {True: 16, False: 40}
"""Of each answer, in a quick and in a whole check."""

ROUNDS = 2  # the second one repeats the first, and n-grams have seen more

N_GRAMS = {"speculate": "ngram"}
SOURCES = {"speculate": "n-grams", "draft_model": "a draft model", "draft_head": "a head"}
"""Sources of drafts, by the option of an engine that asks for the source."""


def check_acceptance(found: Findings, quick: bool) -> None:
    """drafts that are accepted, and tokens with drafts against mlx-lm's, on the demo model"""
    calm = tokens.demo_model(MAX_TOKENS[quick])
    compare(found, calm, {"n-grams": N_GRAMS, "a draft model": {"draft_model": calm.model}})


def check_acceptance_of(
    found: Findings,
    quick: bool,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    options: Mapping[str, Any],
) -> None:
    """The same of a given model, in an engine with `options`. Without a source of drafts among
    the options, n-grams are the source."""
    prompts = [list(tokenizer.encode(prompt)) for prompt in tokens.PROMPTS]
    suffix = list(tokenizer.encode(tokens.SUFFIX))
    is_float32 = all(a.dtype == mx.float32 for _, a in tree_flatten(model.parameters()))
    tie = tokens.TIE if is_float32 else common.TIE
    calm = Calm(model, prompts, suffix, MAX_TOKENS[quick], tie)
    named = [text for option, text in SOURCES.items() if options.get(option) is not None]
    options = dict(options) if named else dict(options) | N_GRAMS
    compare(found, calm, {" and ".join(named) or "n-grams": options})


def compare(found: Findings, calm: Calm, sources: Mapping[str, Mapping[str, Any]]) -> None:
    """Complete the prompts with drafts of each of `sources`, the options of an engine by name, and
    compare the tokens with mlx-lm's."""
    for name in found.progress(list(sources), "source"):
        options = {"num_blocks": 512, "max_running": 6} | dict(sources[name])
        engine = Engine(calm.model, **options)
        play = Play(engine, calm)
        for _ in range(ROUNDS):
            play.run()
        found.failures += [f"{name}: {failure}" for failure in play.wrong]
        found.num_wrong += play.num_wrong
        stats = engine.stats
        depths = [pair for pair in stats.drafts_by_depth if pair[0]]
        found.numbers[name] = {
            "tokens": play.tokens,
            "ties": play.ties,
            "drafts": stats.drafts,
            "accepted_drafts": stats.accepted_drafts,
            "drafts_by_depth": depths,
        }
        found.lines.append(f"{name}: {play.tokens} tokens, {play.ties} ties, {accepted(depths)}")


def accepted(depths: list[list[int]]) -> str:
    """How many drafts were accepted, in all and by depth. `depths` has the computed and the
    accepted drafts of each depth."""
    if not depths:
        return "no drafts: the scheduler expects no gain of them here"
    computed, right = (sum(column) for column in zip(*depths, strict=True))
    by_depth = ", ".join(f"{some} of {number}" for number, some in depths)
    share = round(100 * right / computed)
    return f"{right} of {computed} drafts accepted ({share} %); by depth: {by_depth}"
