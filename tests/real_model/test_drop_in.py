"""mlx-lm's own functions under the patch say what they say without it."""

import json

import mlx_lm_answers

SHORT = (1, 4, 10, 14)  # numbers of questions
LIMIT = 32


def test_the_patch_changes_no_token(directory, float32, answers, tmp_path):
    """One chat alone, then four in one of mlx-lm's batches."""
    out = tmp_path / "patched.json"
    start = mlx_lm_answers.start("patched", directory / "float32", out, LIMIT, *SHORT)
    mlx_lm_answers.ended([start])
    found, tokenizer = json.loads(out.read_text()), float32[1]
    expected = [answers[number][:LIMIT] for number in SHORT]
    assert found["alone"] == expected[0]
    ends = tokenizer.eos_token_ids
    assert found["texts"] == [tokenizer.decode([t for t in x if t not in ends]) for x in expected]
    assert found["paged"] > 0
