"""Rows of several adapters on a model that two processes divide have the tokens of mlx-lm's model
with their adapter alone."""

import json

import pytest

from tests.support.engine import adapter_rank_runs
from tests.support.engine.adapter_rank_runs import RECOVERED, base_of
from tests.support.engine.rank_runs import ended, two_ranks
from tests.support.models.adapters import greedy, random_arrays, with_adapter, write_adapter

SCRIPT = "-m", adapter_rank_runs.__name__
RANKS = 3, 12, 8, 4
SEED = 20


def folders_in(root, name):
    for index, rank in enumerate(RANKS):
        arrays = random_arrays(base_of(name), SEED + index, rank=rank)
        write_adapter(root / f"a{index}", arrays, rank=rank)


def results_of(root, name, scenarios, num_ranks=2):
    """What ranks found, after the tokens of each request were compared with mlx-lm's."""
    folders_in(root, name)
    arguments = [*SCRIPT, name, str(root), *scenarios]
    first, *others = ended(two_ranks(arguments, num_ranks=num_ranks))
    for other in others:
        assert first[2] == other[2] == 0, first[1] + other[1]
        assert first[1].count(RECOVERED) == other[1].count(RECOVERED)
    found, differing = json.loads(first[0]), 0
    for each in found.values():
        assert each["ranks"] == num_ranks and each["leaks"] == 0
        for got in each["found"]:
            if got["error"] is not None:
                continue
            folder = None if got["folder"] is None else root / got["folder"]
            model, count = with_adapter(base_of(name), folder), len(got["tokens"])
            assert got["tokens"] == greedy(model, got["prompt"], count), got
            differing += got["tokens"] != greedy(base_of(name), got["prompt"], count)
    assert differing > 3, "the adapters change nothing"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scenarios"),
    [
        ("llama", ["mixed", "mixed:compiled"]),
        ("llama/4bit", ["mixed", "mixed:compiled"]),
        ("qwen3_moe", ["mixed", "mixed:compiled"]),
        ("qwen3_5", ["mixed"]),
        ("llama", ["random:180000", "random:1000000"]),
        ("kimi_k3", ["mixed"]),
        ("gpt_oss", ["mixed"]),
        ("deepseek_v3", ["mixed"]),
    ],
)
def test_rows_have_the_tokens_of_their_adapters(name, scenarios, tmp_path):
    found = results_of(tmp_path, name, scenarios)
    assert all(got["error"] is None for each in found.values() for got in each["found"])
    for scenario, each in found.items():
        assert each["way"] == "compiled decodes" or not scenario.endswith("compiled"), each["way"]


@pytest.mark.slow
def test_prefixes_belong_to_adapters(tmp_path):
    (each,) = results_of(tmp_path, "llama", ["prefixes"]).values()
    assert [got["cached"] > 0 for got in each["found"]] == [False, False, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), [("llama", 180_000), ("qwen3_5", 130_000)])
def test_factors_that_leave_the_memory_come_again_and_changed_files_end_their_requests(
    name, memory, tmp_path
):
    """The other requests go on with their tokens, and so do the ranks."""
    (each,) = results_of(tmp_path, name, [f"evicted:{memory}"]).values()
    assert each["loads"] > len(RANKS) + 2
    changed, missing = (got["error"] for got in each["found"] if got["error"] is not None)
    assert "adapter a0" in changed and "has changed" in changed
    assert "adapter a0" in missing and "adapters.safetensors" in missing


@pytest.mark.slow
def test_four_ranks_have_four_parts(tmp_path):
    results_of(tmp_path, "llama:4", ["mixed"], num_ranks=4)


FAILING = """
import sys
from mlx_paged.runner import ranks
from mlx_paged.runner.low_rank_stacks import RankStacks
from tests.support.engine import adapter_rank_runs
put, calls = RankStacks.put, []
def failing(self, *given):
    calls.append(given)
    if len(calls) == 2 and ranks.rank() == int(sys.argv[1]):
        raise MemoryError("planted")
    return put(self, *given)
RankStacks.put = failing
adapter_rank_runs.main(*sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_put_factors_into_memory_ends_the_run_with_one_error(rank, tmp_path):
    """It does not leave the others in a sum."""
    folders_in(tmp_path, "llama")
    arguments = ["-c", FAILING, str(rank), "llama", str(tmp_path), "mixed"]
    first, second = ended(two_ranks(arguments))
    reason = ("a step failed (MemoryError: planted)", "rank 1 failed: planted")[rank]
    assert f"mlx_paged: error: {reason}: every request ends" in first[1]
    assert (first[1] + second[1]).count("mlx_paged: error:") == 1
    assert first[2] == second[2] == 1
