"""What layers with windows hold beside mlx-lm's caches: counted by hand, and within its limit."""

import json

import pytest

from scripts import windowed_memory
from scripts.windowed_memory import MODELS, compare, serve, windowed_model
from tests.support.models.tiny_models import tiny_model

TOKEN_BYTES = 2 * 2 * 8 * 4  # of a layer: K and V, two heads of 8 float32
LAYERS = {"gemma3": (10, 2), "gpt_oss": (2, 2), "cohere2": (6, 2), "exaone4": (6, 2)}
LAYERS |= {"gemma3n": (8, 2)}  # five of its layers share the K/V of others
"""Layers with a window and without."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mlx_lm_holds_a_window_and_whole_sequences(name):
    windowed, full = LAYERS[name]
    row = compare(windowed_model(name, 24), num_tokens=301, chunk=64, size=8)
    # After the prompt without its last token, which mlx-lm computes alone, there is one decode.
    assert row["mlx_lm_held"] == (windowed * 24 + full * 512) * TOKEN_BYTES
    # A chunk of 64 tokens needs 23 before it; mlx-lm's caches without a window grow by 256.
    assert row["mlx_lm_peak"] == max(
        (windowed * (23 + 64) + full * 256) * TOKEN_BYTES,
        (windowed * (23 + 44) + full * 512) * TOKEN_BYTES,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_what_an_engine_holds_is_whole_blocks_of_all_tokens_at_most(name):
    row = compare(windowed_model(name, 24), num_tokens=301, chunk=64, size=8)
    everything = sum(LAYERS[name]) * 304 * TOKEN_BYTES
    assert 0 < row["held"] <= row["peak"] <= everything


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [16, 64])
def test_an_engine_holds_about_as_much_as_mlx_lm(name, chunk):
    row = compare(windowed_model(name, 24), num_tokens=601, chunk=chunk, size=8)
    assert row["held_ok"] and row["peak_ok"], row


@pytest.mark.slow
def test_two_fifths_of_one_block_tables_memory_are_enough_for_chats():
    model, trace = windowed_model("gemma3", 16), [([i] * 20, 180) for i in range(5)]
    roomy = serve(model, trace, 8, None)
    tight = serve(model, trace, 8, int(0.4 * roomy["one_table_bytes"]))
    assert roomy["peak_running"] == tight["peak_running"] == 5
    assert tight["preemptions"] == 0
    assert tight["tokens_computed"] == roomy["tokens_computed"]


def test_a_model_without_windows_holds_what_one_block_table_needs():
    served = serve(tiny_model("llama"), [([1] * 20, 9), ([2] * 33, 30)], 8, None)
    # The first one ends with 28 tokens of K/V while the other one has 41, which ends with 62.
    token_bytes = 3 * 2 * 2 * 16 * 4
    assert served["peak_bytes"] == served["one_table_bytes"] == (32 + 48) * token_bytes
    assert served["preemptions"] == 0 and served["peak_running"] == 2
    assert served["tokens_computed"] == 53 + 8 + 29


@pytest.mark.slow
def test_too_much_is_said(monkeypatch, capsys):
    options = ["--models", "gemma3", "--windows", "8", "--chunks", "16", "--chats", "2"]
    options += ["--block-size", "8", "--prompt-tokens", "50", "--pool", "0.9"]
    for held, said in ((1, "ok"), (1 << 30, "too much")):
        monkeypatch.setattr(windowed_memory, "held_bytes", lambda engine, held=held: held)
        monkeypatch.setattr(windowed_memory, "chats", lambda count: [([1] * 30, 20)] * count)
        windowed_memory.main(options)
        *lines, last = capsys.readouterr().out.splitlines()
        assert lines[1].count(said) == 2
        (row,) = json.loads(last)["rows"]
        assert row["held"] == row["peak"] == held
        assert row["held_ok"] is row["peak_ok"] is (said == "ok")
    result = json.loads(last)
    assert result["pool_bytes"] == int(0.9 * result["roomy"]["one_table_bytes"])
    assert f"In a pool of {result['pool_bytes']} bytes it runs" in "".join(lines)


def test_a_wrong_argument_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        windowed_memory.main(["--pool", "2"])
    assert exit_info.value.code == 2
    error = "argument --pool: expected a number from 0 to 1, got '2'"
    assert capsys.readouterr().err == f"scripts.windowed_memory: error: {error}\n"
