"""Which architectures of mlx-lm are served, and how: writes docs/support.md.

    python -m scripts.support_matrix

Every architecture runs as a tiny random model on the CPU; tests/runner/test_architectures.py checks
that what the table calls served has mlx-lm's own logits.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import Engine, UnsupportedModelError
from mlx_paged.attention.forward import path_counts
from mlx_paged.runner.draft_model import can_draft
from mlx_paged.runner.model_probe import ONE_AT_A_TIME, Batching, ModelProfile, model_type, probe
from mlx_paged.runner.model_runner import ModelRunner
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, VARIANTS, build

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "support.md"

KERNEL, GATHER, STATE = "kernel", "gather", "state only"
REFUSED, NOT_RUN = "refused", "not on a CPU"
SERVED = (KERNEL, GATHER, STATE)
YES = "yes"
ANYWHERE, AT_SNAPSHOTS = YES, "at snapshots"

PATHS = {
    KERNEL: "the paged op attends to the blocks in place",
    GATHER: "the K/V is gathered first, because the op does not support the attention",
    STATE: "the model has no K/V, only a state of fixed size for each sequence",
    REFUSED: "`UnsupportedModelError` when the engine is constructed",
    NOT_RUN: "mlx-lm itself does not run on a CPU, so the model was not tested",
}
STEPS = {
    Batching.MIXED: "prompt chunks and decodes in one forward",
    Batching.ALTERNATE: "all decodes in one forward, each prompt chunk in a separate forward",
    Batching.SINGLE: "a separate forward for each sequence",
}
LONG_PROMPTS, SHORT_PROMPTS = [[*range(20)], [4, 5]], [[1, 2, 3], [4, 5]]
RAGGED = "its attention does not support masks or positions of several sequences"

HEADER = """# Supported architectures

This page lists every architecture of mlx-lm {version}. Search for the `model_type` in the
`config.json` of a model. `python -m scripts.support_matrix` writes this page; do not edit it.

The tests run each architecture as a tiny random float32 model, on Linux on a CPU. They compare the
logits of the supported architectures with those of mlx-lm, which computes one sequence at a time
with its own cache: the relative error is below 1e-4. The cases are batches of sequences of
different lengths, chunked prompts that arrive while other requests decode, samples of one prompt,
and shared prefixes (`tests/runner/test_architectures.py`).

The column `decodes` describes how a model computes the next token of a sequence:

| decodes | architectures | |
|---|---|---|
{totals}

The column `step` describes what a step computes in one forward (one run of the model):

| step | |
|---|---|
{steps}

The column `compiled decodes` has "yes", or the reason that an engine with `compile=True` reports on
a CPU ([details](compiled-decodes.md#where-it-is-on)):

| compiled decodes | architectures |
|---|---|
{compiled}

The other columns:

- Architecture: a name with a comma is the same architecture with another option. It is not counted
  above.
- Shared prefixes: "yes" means that requests share a prefix up to any token. "At snapshots" means
  that the model has states of fixed size. Such a state belongs to one position of a text, so
  requests share a prefix only up to a position with a kept copy
  ([details](engine.md#models-with-recurrent-layers)).
- Drafts: "yes", or why the model computes no drafts ([speculation](speculation.md)).
- The last column has other properties, or why the model is not supported.

| architecture | decodes | step | shared prefixes | drafts | compiled decodes | |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the table.

    Attributes:
        path: one of `PATHS`.
        batching: what shares a forward; None unless it is served.
        prefixes: up to where prompts that start alike share what was computed.
        drafts: "yes", or why none are computed.
        compiled: "yes", or why decodes are no compiled graphs.
        note: the reason, where something is missing.
    """

    path: str
    batching: Batching | None = None
    prefixes: str = ""
    drafts: str = ""
    compiled: str = ""
    note: str = ""

    def row(self, name: str) -> str:
        batching = self.batching or ""
        kinds = self.prefixes, self.drafts, self.compiled
        cells = name, self.path, batching, *kinds, self.note
        return f"| {' | '.join(cells)} |"


def support_of(model: nn.Module) -> Support:
    """What the engine does with this model, seen in decodes of sequences longer than any limit of
    its attention, and of short ones."""
    try:
        profile = probe(model)
    except UnsupportedModelError as error:
        return Support(REFUSED, note=str(error))
    paths = [_path(model, profile, prompts) for prompts in (LONG_PROMPTS, SHORT_PROMPTS)]
    return Support(
        paths[0],
        profile.batching,
        prefixes=AT_SNAPSHOTS if profile.states.exist else ANYWHERE,
        drafts=YES if can_draft(profile) else "one sequence at a time",
        compiled=_compiled(model),
        note=_note(model, profile, paths),
    )


def _path(model: nn.Module, profile: ModelProfile, prompts: list[list[int]]) -> str:
    if not any(profile.shapes):
        return STATE
    path_counts.clear()
    Engine(model, block_size=4, num_blocks=12).generate(prompts, max_tokens=3)
    return KERNEL if path_counts["paged"] else GATHER


def _compiled(model: nn.Module) -> str:
    engine = Engine(model, block_size=4, num_blocks=12, compile=True, prewarm=False)
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner.why_plain or YES


def _note(model: nn.Module, profile: ModelProfile, paths: list[str]) -> str:
    if profile.batching is Batching.SINGLE:
        return ONE_AT_A_TIME.get(model_type(model), RAGGED)
    notes = []
    if any(shape.latent for shape in profile.shapes if shape is not None):
        notes.append("a latent is stored once for keys and values")
    if paths == [GATHER, KERNEL]:
        notes.append("in place until its indexer has more tokens than it selects")
    if profile.states.exist and any(profile.shapes):
        notes.append("also has states of fixed size")
    if profile.states.exist and not profile.states.are_diverted:
        notes.append("each request with drafts in a separate forward")
    plan = profile.pool_plan(16)
    if any(group.window is not None for group in plan.groups):
        notes.append("blocks before windows are freed")
    return "; ".join(notes)


def support(name: str) -> Support:
    """The same for an architecture or a variant."""
    if name in NOT_ON_A_CPU:
        return Support(NOT_RUN, note=NOT_ON_A_CPU[name])
    return support_of(build(name))


def names() -> list[str]:
    """All rows, in the order of the table."""
    return sorted([*ARCHITECTURES, *VARIANTS], key=str.casefold)


def document(supports: Iterable[tuple[str, Support]]) -> str:
    """The whole file."""
    rows = list(supports)
    counts = Counter(row.path for name, row in rows if name in ARCHITECTURES)
    totals = "\n".join(f"| {path} | {counts[path]} | {text} |" for path, text in PATHS.items())
    steps = "\n".join(f"| {batching} | {text} |" for batching, text in STEPS.items())
    reasons = Counter(row.compiled for name, row in rows if name in ARCHITECTURES and row.compiled)
    compiled = "\n".join(f"| {reason} | {count} |" for reason, count in reasons.most_common())
    header = HEADER.format(version=version("mlx-lm"), totals=totals, steps=steps, compiled=compiled)
    return header + "".join(row.row(name) + "\n" for name, row in rows)


def main() -> None:
    mx.set_default_device(mx.Device(mx.cpu))
    DOCUMENT.write_text(document((name, support(name)) for name in names()))


if __name__ == "__main__":
    main()
