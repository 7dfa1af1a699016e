"""The memory bench: what it counts, by hand."""

import json

import pytest

from bench import memory

TOKEN_BYTES = 2 * 2 * 32 * 4  # K and V, two layers, one head of 32 float32
OPTIONS = ["--model=tiny", "--n=3", "--max-tokens=9", "--block-size=8", "--own-tokens=6"]


def run(capsys, *options):
    memory.main([*OPTIONS, *options])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_equal_blocks_after_unequal_ones_are_distinct():
    assert memory.distinct_blocks([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9]], 2) == 3
    assert memory.distinct_blocks([[1, 2, 3, 4], [5, 6, 3, 4]], 2) == 4


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


def test_beams_hold_the_prompt_once_and_copy_where_they_part(capsys):
    _, result = run(capsys, "--prompt-tokens=40")
    beams = result["beams"]
    assert beams["prompt_tokens_computed"] == 40
    assert 5 < beams["peak_blocks"] < 3 * 6
    assert 0 < beams["cow_clones"] <= 3 * 9
    assert beams["mlx_lm_bytes"] is None and beams["distinct_blocks"] is None


def test_requests_share_the_prefix_that_they_have_in_common(capsys):
    _, result = run(capsys, "--prompt-tokens=600")  # more than a step's: the others come after it
    prefixes = result["prefixes"]
    assert 600 < prefixes["prompt_tokens_computed"] <= 600 + 3 * 6
    assert prefixes["peak_blocks"] <= prefixes["distinct_blocks"] <= 75 + 3 * 2
    assert prefixes["copies_bytes"] > 2 * prefixes["peak_bytes"]


def test_the_same_arguments_count_the_same(capsys):
    assert run(capsys, "--prompt-tokens=33") == run(capsys, "--prompt-tokens=33")


def test_a_wrong_argument_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        memory.main(["--n", "0"])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == ""
    assert err == "bench.memory: error: argument --n: expected a whole number >= 1, got '0'\n"
