"""Windowed architectures compute what mlx-lm does: a sample of scripts.windowed_parity."""

import json
from collections.abc import Callable
from itertools import product

import pytest

from mlx_paged import UnsupportedModelError
from mlx_paged.attention.causal import causal
from mlx_paged.attention.forward import LayerView
from mlx_paged.kv.allocator import BlockAllocator
from scripts.windowed_parity import (
    BLOCK_SIZES,
    CHUNKS,
    MOST_ROUNDED,
    NAMES,
    SCENARIOS,
    Case,
    Scenarios,
    main,
)
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, VARIANTS, build
from tests.support.models.windowed_reference import Reference, limits_of

SIZES = [*product((8, 20), CHUNKS, BLOCK_SIZES)]
SAMPLE = [Case(name, *SIZES[7 * i % len(SIZES)]) for i, name in enumerate(NAMES)]
"""A case of each architecture. Together they have all windows, chunks and block sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES.__getitem__)
def test_windows_change_nothing(number):
    case = SAMPLE[number]
    scenarios = Scenarios(Reference(case.name, case.window), case)
    for i in range(2):  # other ones in each case
        getattr(scenarios, SCENARIOS[(2 * number + i) % len(SCENARIOS)])()
    assert scenarios.counts["near_ties"] <= 1


QUANTIZED = "llama, windowed", "gemma3", "gpt_oss", "gemma4_text"
"""Models whose layers all may be quantized; the last one has layers of several sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", [8, 6, 4])
@pytest.mark.parametrize("sizes", [*product((7, 64, 512), (8, 16, 32))], ids=str)
def test_quantized_layers_compute_what_mlx_lm_does_over_the_same_values(kv_bits, sizes):
    number = [*product((7, 64, 512), (8, 16, 32))].index(sizes)
    name = QUANTIZED[number % len(QUANTIZED)]
    scenarios = Scenarios(Reference(name, 20, kv_bits), Case(name, 20, *sizes))
    for scenario in ("preemptions", "forks", "prefixes", "arrivals"):
        getattr(scenarios, scenario)()
    rounded, compared = (scenarios.counts[name] for name in ("rounded", "compared"))
    assert scenarios.counts["near_ties"] <= 1
    assert rounded <= MOST_ROUNDED * compared


@pytest.mark.slow
@pytest.mark.parametrize(("kv_bits", "others"), [(None, 8), (8, 6), (6, 4), (4, 8)])
def test_other_bits_are_noticed(kv_bits, others):
    reference = Reference("gemma3", 20, kv_bits)
    scenarios = Scenarios(reference, Case("gemma3", 20, 7, 8))
    engine = scenarios.engine
    scenarios.engine = lambda **options: engine(**options | {"kv_bits": others})
    with pytest.raises(AssertionError, match="differ"):
        scenarios.arrivals()


def is_windowed_and_served(name: str) -> bool:
    try:
        return bool(limits_of(build(name)))
    except UnsupportedModelError:
        return False


@pytest.mark.slow
def test_every_windowed_architecture_is_in_the_matrix():
    names = sorted({*ARCHITECTURES, *VARIANTS} - NOT_ON_A_CPU.keys(), key=str.casefold)
    assert tuple(filter(is_windowed_and_served, names)) == NAMES


def test_the_sample_has_all_sizes():
    assert {(case.window, case.prefill_chunk, case.block_size) for case in SAMPLE} == set(SIZES)


def change_windows(monkeypatch: pytest.MonkeyPatch, change: Callable[[int], int | None]) -> None:
    """Let layers with a window attend with another one."""
    whole = LayerView.through_tables

    def through_tables(view, query, *args):
        window = query.sees.window and change(query.sees.window)
        return whole(view, query._replace(sees=causal(window)), *args)

    monkeypatch.setattr(LayerView, "through_tables", through_tables)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_window_of_one_token_less_is_noticed_by(scenario, monkeypatch):
    change_windows(monkeypatch, lambda window: window - 1)
    scenarios = Scenarios(Reference("gemma3", 20), Case("gemma3", 20, 7, 8))
    with pytest.raises(AssertionError, match="differ"):
        getattr(scenarios, scenario)()


@pytest.mark.slow
def test_blocks_that_are_released_one_token_too_early_are_noticed(monkeypatch):
    # A sequence keeps a token more than its window. Blocks go when another one is full: at that
    # position this window begins with a block.
    whole = BlockAllocator.trim
    monkeypatch.setattr(
        BlockAllocator, "trim", lambda self, i, position, **k: whole(self, i, position + 2, **k)
    )
    name = "muse_glimmer, windows only"
    scenarios = Scenarios(Reference(name, 18), Case(name, 18, 64, 8))
    with pytest.raises(AssertionError, match="differ"):
        scenarios.arrivals()


@pytest.mark.slow
def test_failures_are_printed_with_the_command_that_repeats_them(monkeypatch, capsys):
    change_windows(monkeypatch, lambda window: None)
    sizes = ["--windows", "8", "--chunks", "64", "--block-sizes", "16"]
    assert main(["--names", "gpt_oss", *sizes]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    counts = json.loads(last)
    assert counts["failures"] == counts["scenarios"] == len(SCENARIOS)
    command = f"python -m scripts.windowed_parity --names 'gpt_oss' {' '.join(sizes)}"
    assert lines.count(command) == len(SCENARIOS)
