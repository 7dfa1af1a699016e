"""What common models need is checked first, with few pipelines, and mistakes in it are found."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import ops
from mlx_paged.doctor import apart, common, flags
from mlx_paged.doctor import command as doctor
from mlx_paged.doctor.findings import Findings, run_check
from mlx_paged.doctor.kernels import chosen
from mlx_paged.doctor.variants import Variant, common_variants, launches_of

FEW = 40
"""Pipelines that a Mac compiles in well below a minute: tenths of a second each."""


def pipelines(variants: list[Variant]) -> set[tuple[str, str]]:
    launches = (launch for variant in variants for launch in launches_of(variant))
    return {(launch["library"], launch["pipeline"]) for launch in launches}


def test_few_pipelines_come_first():
    assert list(doctor.CHECKS) == list(flags.CHECKS)
    assert list(doctor.CHECKS)[:2] == ["machine", "common"] and "common" in doctor.APART
    assert 20 < len(pipelines(common_variants())) <= FEW


@pytest.mark.slow
def test_a_quick_check_compiles_few_libraries():
    assert len({library for library, _ in pipelines(chosen(quick=True))}) < 233 // 2


def test_each_variant_can_be_repeated():
    for variant in common_variants():
        assert doctor._chosen(variant.name)
    assert {variant.shape.kv_bits for variant in common_variants()} == {None, 8}
    assert all(v.model_dtype == mx.bfloat16 for v in common_variants() if v.heads != "d32")


def test_a_wrong_kernel_of_a_common_model_is_a_wrong_number(monkeypatch):
    right = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *a, **o: right(*a, **o) * 1.02)
    monkeypatch.setattr(common, "LENGTHS", ())
    found = run_check(Findings("common"), common.check_common, True)
    assert found.num_wrong == 12  # of four pools: a decode, a chunk and a long context


def test_wrong_attention_in_an_engine_gives_wrong_tokens(monkeypatch):
    right = ops.attend

    def wrong(q: mx.array, *rest: Any, **options: Any) -> mx.array:
        return right(q[:, ::-1], *rest, **options)

    monkeypatch.setattr(ops, "attend", wrong)
    monkeypatch.setattr(common, "common_variants", list)
    found = run_check(Findings("common"), common.check_common, True)
    assert found.num_wrong >= 3
    assert all(", mlx-lm's [" in failure for failure in found.failures)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_far_a_process_is(is_terminal, monkeypatch, capsys):
    def run(command, **options):
        path = Path(command[command.index("--json") + 1])
        checks = {"kernels": asdict(Findings("kernels", counted="412 of 990 variants"))}
        path.write_text(json.dumps({"checks": checks}))
        time.sleep(0.3)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(apart, "SHOWN_EVERY_S", 0.02)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    apart.found_apart(Findings("chunk"), False)
    assert ("chunk: 412 of 990 variants" in capsys.readouterr().err) == is_terminal
