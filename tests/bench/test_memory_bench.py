"""The memory bench: what it counts, by hand, and what it times."""

import json
import math

import pytest

from bench import memory
from bench.models import random_prompts
from tests.support.models.tiny_models import solo_greedy, tiny_model

TOKEN_BYTES = 2 * 2 * 32 * 4  # K and V, two layers, one head of 32 float32
OPTIONS = ["--model=tiny", "--n=3", "--max-tokens=9", "--block-size=8", "--own-tokens=6"]


def run(capsys, *options):
    memory.main([*OPTIONS, *options])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_equal_blocks_after_unequal_ones_are_distinct():
    assert memory.distinct_blocks([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9]], 2) == 3
    assert memory.distinct_blocks([[1, 2, 3, 4], [5, 6, 3, 4]], 2) == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_prompt", "blocks", "clones"),
    # Three samples end with 8 tokens of their own that are kept.
    [(20, 2 + 3 * 2, 2), (24, 3 + 3 * 1, 0)],
)
def test_samples_hold_the_prompt_once(num_prompt, blocks, clones, capsys):
    _, result = run(capsys, f"--prompt-tokens={num_prompt}")
    samples = result["samples"]
    assert samples["prompt_tokens_computed"] == num_prompt
    assert samples["tokens_generated"] == 3 * 9
    assert samples["peak_blocks"] == samples["distinct_blocks"] == blocks
    assert samples["peak_bytes"] == blocks * 8 * TOKEN_BYTES
    assert samples["copies_bytes"] == 3 * (num_prompt + 8) * TOKEN_BYTES
    assert (samples["cow_clones"], samples["cow_bytes"]) == (clones, clones * 8 * TOKEN_BYTES)
    assert samples["cow_clones_per_token"] == pytest.approx(clones / 27, abs=1e-5)
    assert samples["mlx_lm_bytes"] == 3 * 256 * TOKEN_BYTES  # mlx-lm's caches grow by 256


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("num_prompt", "n", "max_tokens", "block_size", "least", "clones"),
    [
        (48, 3, 17, 16, 6, 0),  # blocks are full everywhere: nothing to copy, nothing lost
        (45, 3, 9, 16, 8, 2),
        (45, 3, 9, 8, 11, 2),
        (45, 4, 2, 16, 6, 3),  # the last token's K/V is never needed
        (5, 1, 4, 32, 1, 0),
    ],
)
def test_samples_copy_a_part_filled_block_at_most(
    num_prompt, n, max_tokens, block_size, least, clones, capsys
):
    sizes = [f"--prompt-tokens={num_prompt}", f"--n={n}", f"--block-size={block_size}"]
    lines, result = run(capsys, *sizes, f"--max-tokens={max_tokens}")
    ideal = (num_prompt + n * (max_tokens - 1)) / block_size
    samples = result["samples"]
    assert lines[0].startswith(f"Floor of the samples: {ideal:.1f} blocks of {block_size}")
    assert samples["peak_blocks"] == samples["distinct_blocks"] == least
    assert result["kv_blocks_ideal"] == ideal
    assert result["ratio"] == pytest.approx(least / ideal, abs=1e-4)
    assert samples["cow_clones"] == clones


def test_beams_hold_the_prompt_once_and_copy_where_they_part(capsys):
    _, result = run(capsys, "--prompt-tokens=40")
    beams = result["beams"]
    assert beams["prompt_tokens_computed"] == 40
    assert 5 < beams["peak_blocks"] < 3 * 6
    assert 0 < beams["cow_clones"] <= 3 * 9
    assert beams["mlx_lm_bytes"] is None and beams["distinct_blocks"] is None


@pytest.mark.slow
def test_requests_share_the_prefix_that_they_have_in_common(capsys):
    _, result = run(capsys, "--prompt-tokens=600")  # more than a step's: the others come after it
    prefixes = result["prefixes"]
    assert 600 < prefixes["prompt_tokens_computed"] <= 600 + 3 * 6
    assert prefixes["peak_blocks"] <= prefixes["distinct_blocks"] <= 75 + 3 * 2
    assert prefixes["copies_bytes"] > 2 * prefixes["peak_bytes"]


@pytest.mark.slow
def test_the_same_arguments_count_the_same(capsys):
    assert run(capsys, "--prompt-tokens=33") == run(capsys, "--prompt-tokens=33")


@pytest.mark.slow
def test_rounds_time_the_samples_in_three_ways(capsys):
    lines, result = run(capsys, "--prompt-tokens=45", "--rounds=1")
    block_bytes = 8 * TOKEN_BYTES
    assert result["same_samples"] == 3
    assert result["fork_us"] > result["allocator_fork_us"] > 0
    assert result["forked_kv_mib"] == pytest.approx(11 * block_bytes / 2**20, abs=0.01)
    for name in ("forked", "separate", "mlx_lm"):
        assert result[f"{name}_wall_s"] >= 0 and sum(line.startswith(name) for line in lines) == 1
    assert result["gemm_gflops"] > 0 and "load_average" in result


def workload(num_prompt, n, max_tokens=5):
    [prompt] = random_prompts(1, num_prompt, "tiny")
    return memory.Workload(prompt, [], n, max_tokens, 8)


def test_timing_forks_leaves_nothing_behind(model):
    work = workload(40, 3)
    engine = memory.make_engine(model, work, work.n + 2)
    assert memory.time_forks(engine, work)["fork_us"] > 0
    assert not engine.has_work
    assert engine.stats.requests_finished == 1 + memory.FORK_BATCHES * (1 + work.n)
    engine.manager.allocator.check_integrity()
    assert engine.manager.allocator.store.blocks_in_use == 0


def test_separate_requests_share_nothing(model):
    work = workload(600, 3)  # more than a step's: the first one is ahead
    engine = memory.make_engine(model, work, work.n, prefix_cache=False)
    timed = memory.time_engine(memory.separate_samples, engine, work)
    assert engine.stats.prompt_tokens == 3 * 600
    assert timed.kv_bytes_peak == 3 * math.ceil(604 / 8) * engine.stats.block_bytes
    assert [len(sample) for sample in timed.samples] == [5, 5, 5]


def test_mlx_lm_continues_copies_of_the_whole_prompt(monkeypatch):
    monkeypatch.setattr(memory, "TEMPERATURE", 0.0)
    monkeypatch.setattr(memory, "MLX_LM_PREFILL_STEP", 16)
    model, work = tiny_model("llama"), workload(40, 10)
    timed = memory.time_mlx_lm(model, work)
    assert timed.samples == 10 * [solo_greedy(model, work.prompt, 5)]
    assert timed.kv_bytes_peak >= 10 * 44 * 3 * 2 * 2 * 16 * 4


def test_a_wrong_argument_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        memory.main(["--n", "0"])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == ""
    assert err == "bench.memory: error: argument --n: expected a whole number >= 1, got '0'\n"
