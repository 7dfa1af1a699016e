"""Several completions of a prompt on the command line: samples, the best of them, beams."""

import mlx.core as mx
import numpy as np
import pytest

from tests.support.commands.generate_runs import CLASS, FUNCTION, jsonl, read_jsonl

pytest_plugins = ["tests.support.commands.generate_fixtures"]


@pytest.fixture
def records(run, tmp_path):
    """Run the command. Returns the lines of --output."""

    def records(*arguments):
        output = tmp_path / "results.jsonl"
        result = run(*arguments, "--output", output, "--overwrite")
        assert result.status == 0, result.err
        return read_jsonl(output)

    return records


def test_samples_are_numbered_and_equal_the_same_seeds_alone(run, records, tmp_path):
    lines = [{"prompt": FUNCTION, "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 12}]
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    samples = records("--prompts-file", file)
    assert [record["index"] for record in samples] == [0, 1, 2]
    for i, sample in enumerate(samples):
        jsonl(file, [lines[0] | {"n": 1, "seed": 5 + i}])
        (alone,) = records("--prompts-file", file)
        assert "index" not in alone
        assert sample["tokens"] == alone["tokens"]
    jsonl(file, lines)
    out = run("--prompts-file", file, "-p", CLASS, "-m", 2).out
    assert f"2/2 (1/3): {FUNCTION}\n{samples[0]['text']}\n" in out
    assert f"1/2: {CLASS}\n" in out


def test_the_best_of_several_are_kept(records):
    options = ["-p", FUNCTION, "-m", 10, "--temp", 1, "--seed", 3]
    every = records(*options, "--n", 6)
    best = records(*options, "--n", 2, "--best-of", 6)
    ranked = sorted(every, key=lambda record: -np.mean(record["logprobs"]))
    assert [r["tokens"] for r in best] == [r["tokens"] for r in ranked[:2]]


def test_beams_come_with_their_scores_best_first(run, records):
    beams = records("-p", CLASS, "-m", 8, "--beams", 3, "--length-penalty", 0.5)
    scores = [record["score"] for record in beams]
    assert scores == sorted(scores, reverse=True) and len(beams) == 3
    for record in beams:
        length = len(record["tokens"]) ** 0.5
        assert record["score"] == pytest.approx(sum(record["logprobs"]) / length, rel=1e-5)
    result = run("-p", CLASS, "-m", 8, "--beams", 3)
    assert "1/1 (3/3)" in result.out and "Generation:" in result.err


def test_the_most_likely_tokens_are_written(demo, records):
    model, tokenizer = demo
    (record,) = records("-p", FUNCTION, "-m", 3, "--logprobs", 4)
    assert [top[0][0] for top in record["top_logprobs"]] == record["tokens"]
    logits = model(mx.array([tokenizer.encode(FUNCTION)]))[0, -1]
    expected = np.sort(np.array(logits - mx.logsumexp(logits)))[::-1][:4]
    np.testing.assert_allclose([lp for _, lp in record["top_logprobs"][0]], expected, atol=1e-4)


def test_penalties_reach_the_requests(records):
    (plain,) = records("-p", FUNCTION, "-m", 24)
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        (penalised,) = records("-p", FUNCTION, "-m", 24, option, 5)
        assert penalised["tokens"] != plain["tokens"]


def test_a_line_that_fails_on_the_way_is_reported_and_the_others_are_finished(run, demo, tmp_path):
    """Its biases forbid every token."""
    output = tmp_path / "results.jsonl"
    none = {str(token): "-inf" for token in range(demo[0].args.vocab_size)}
    lines = [{"prompt": CLASS, "logit_bias": none}, {"prompt": FUNCTION}]
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    result = run("--prompts-file", file, "-m", 4, "--output", output)
    assert result.status == 1
    assert f"{file} line 1: ValueError: " in result.err and "leave no token" in result.err
    failed, finished = read_jsonl(output)
    assert failed["finish_reason"] == "error" and "leave no token" in failed["error"]
    assert finished["finish_reason"] == "length" and len(finished["tokens"]) == 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        ["--max-stall-ms", 5],
        ["--policy", "priority"],
        ["--policy", "shortest"],
        ["--preempt", "longest", "--kv-memory", 0.0006],
        ["--no-prefix-cache"],
        ["--lookahead"],
        ["--no-lookahead"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_engine_options_change_no_token(records, options):
    prompts = [f"--prompt={prompt}" for prompt in (FUNCTION, CLASS, FUNCTION * 9, CLASS * 5)]
    expected = [record["tokens"] for record in records(*prompts, "-m", 30)]
    found = records(*prompts, "-m", 30, "--prefill-chunk", 16, *options)
    assert [record["tokens"] for record in found] == expected
