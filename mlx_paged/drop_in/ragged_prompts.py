"""Prompts of several lengths in mlx-lm's own batches of recurrent models."""

from collections.abc import Sequence

from mlx_lm.generate import PromptProcessingBatch

from mlx_paged.runner.model_probe import model_type

STATES_OVER_PADDING = frozenset(
    {
        "baichuan_m1",
        "bailing_moe_linear",
        "jamba",
        "mamba",
        "nemotron_h",
        "olmo_hybrid",
        "recurrent_gemma",
        "rwkv7",
    }
)
"""Models that take a row's right padding into its recurrent state in mlx-lm 0.32.2 itself."""

stock_prompt = PromptProcessingBatch.prompt


def prompt_without_padding(batch: PromptProcessingBatch, tokens: Sequence[list[int]]) -> None:
    """mlx-lm's method, but rows of these models that would be padded are computed one by one."""
    is_ragged = len({len(row) for row in tokens}) > 1
    if not is_ragged or model_type(batch.model) not in STATES_OVER_PADDING:
        stock_prompt(batch, tokens)
        return
    rows = [batch.split([0]) for _ in tokens]
    try:
        for row, row_tokens in zip(rows, tokens, strict=True):
            stock_prompt(row, [row_tokens])
    finally:
        for row in rows:
            batch.extend(row)
