"""The bench of an agent's trace: what it counts and prints; never times."""

import json

import pytest

from bench import agent_trace
from bench.agent_prompts import SHORTENED, encoded, make_trace


def test_the_trace_has_what_agents_do():
    trace = make_trace()
    assert len(trace) == 20 and {turn.agent for turn in trace} == {"main", "tests", "documents"}
    assert [turn.messages for turn in make_trace()] == [turn.messages for turn in trace]
    (changed,) = [i for i, turn in enumerate(trace) if SHORTENED in str(turn.messages[-3:])] or [
        next(i for i, turn in enumerate(trace) if SHORTENED in str(turn.messages))
    ]
    before, after = (trace[i].messages for i in (changed - 1, changed))
    assert sum(a != b for a, b in zip(before, after, strict=False)) == 1
    assert len({str(turn.messages[0]) for turn in trace}) == 1


def test_a_thought_is_left_out_after_the_next_question():
    tokenizer = agent_trace.load_model(str(agent_trace.demo_model_path()))[1]
    first, *_ = encoded(make_trace()[3:6], tokenizer)
    texts = [tokenizer.decode(p.tokens) for p in encoded(make_trace()[2:6], tokenizer)]
    assert ["<think>" in text for text in texts] == [True, True, False, False]
    assert first.known == 0 and tokenizer.decode(first.answer).startswith("<think>")


@pytest.mark.heavy
@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["lfm2", "nemotron_h"])
def test_recurrent_layers_reuse_what_attention_does(model, capsys, monkeypatch):
    monkeypatch.setattr(agent_trace, "make_trace", lambda: make_trace()[:6])
    agent_trace.main([f"--model={model}", "--size=tiny", "--rounds=1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == "agent_trace" and result["reuse_ratio"] >= 0.95
    assert result["reused"]["llama"] <= result["known"] < result["prompt_tokens"]


@pytest.mark.slow
def test_few_snapshots_are_those_that_count(capsys):
    agent_trace.main(["--size=tiny", "--rounds=1", "--snapshots=12"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["snapshots"] == 12 and result["reuse_ratio"] >= 0.95


@pytest.mark.heavy
@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["llama", "gemma3_text", "qwen3_next"])
def test_a_prompt_that_changes_reuses_what_comes_before(model, capsys, monkeypatch):
    monkeypatch.setattr(agent_trace, "make_trace", lambda: make_trace()[:2])
    agent_trace.main(["--changes", "50", f"--model={model}", "--size=tiny"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["change"] for row in result["changes"]] == ["50 %"] * 2 + ["thoughts"] * 2
    assert result["least"] >= 0.95
    firsts = result["changes"][::2]
    assert all(row["reused"] <= row["known"] < row["tokens"] for row in firsts)
