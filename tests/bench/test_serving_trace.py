"""The serving bench's workloads: lengths, arrivals, trace files, who sends the next request."""

import json
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from bench.flags.presets import AGENTS, PRESETS
from bench.models import copying_llama, first_layers, llama_model, successors
from bench.serving.trace import Job, digest, make_trace, read_trace, write_trace
from bench.serving.workload import ClosedLoop, OpenLoop, arrival_times, make_jobs


def trace_of(preset, seed=0, rate=4.0, **options):
    jobs = make_jobs(PRESETS[preset], 100, seed, **options)
    return make_trace(jobs, arrival_times(len(jobs), rate, seed=seed))


def test_the_reference_workload_is_the_published_one():
    jobs = make_jobs(PRESETS["reference"], 2048, seed=0)
    rng = np.random.default_rng(0)
    assert [len(job.prompt) for job in jobs] == rng.integers(32, 512, 96).tolist()
    assert [job.max_tokens for job in jobs] == rng.integers(32, 192, 96).tolist()
    assert sum(job.output_tokens for job in jobs) == 11_410
    assert sum(len(job.prompt) - 1 for job in jobs) == 26_732  # all but the token that is decoded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_seed_gives_the_same_trace_and_another_one_another(preset):
    trace = trace_of(preset)
    assert trace == trace_of(preset) and digest(trace) == digest(trace_of(preset))
    assert digest(trace) != digest(trace_of(preset, seed=1))
    assert len(trace) == PRESETS[preset].requests
    assert all(0 <= token < 100 for job in trace for token in job.prompt)


def test_presets_are_what_their_names_say():
    shared = make_jobs(PRESETS["shared-system-prompt"], 100, 0)
    assert len({job.prompt[:256] for job in shared}) == 1 < len({job.prompt for job in shared})
    assert {len(job.prompt) for job in make_jobs(PRESETS["agent"], 100, 0)} == {4096}
    turns = [job.prompt for job in make_jobs(PRESETS["agent-turns"], 100, 0)]
    assert len({prompt[:16] for prompt in turns}) == AGENTS
    for before, after in zip(turns, turns[AGENTS:], strict=False):
        assert after[: len(before)] == before and 256 <= len(after) - len(before) < 512
    giants = [
        job for job in make_jobs(PRESETS["one-giant-prompt"], 100, 0) if len(job.prompt) > 999
    ]
    assert [len(job.prompt) for job in giants] == [8192]
    assert {job.samples for job in make_jobs(PRESETS["fork-heavy"], 100, 0)} == {8}
    for preset, count, prompt, output in (
        ("one-stream", 1, 1000, 128),
        ("prompt-7k", 1, 7000, 32),
        ("prompt-32k", 1, 32000, 32),
        ("few-chats", 4, 400, 128),
        ("many-chats", 16, 100, 128),
    ):
        lengths = [(len(job.prompt), job.max_tokens) for job in make_jobs(PRESETS[preset], 100, 0)]
        assert lengths == [(prompt, output)] * count
    chat = [len(job.prompt) for job in make_jobs(PRESETS["long-tail-chat"], 100, 0, requests=999)]
    assert np.percentile(chat, 99) > 5 * np.median(chat)


@pytest.mark.parametrize("preset", ["uniform", "fork-heavy"])
def test_a_tokens_target_takes_as_many_requests_as_it_needs(preset):
    jobs = make_jobs(PRESETS[preset], 100, 0, tokens_target=3000)
    total = sum(job.output_tokens for job in jobs)
    assert total - jobs[-1].output_tokens < 3000 <= total


def test_poisson_arrivals_have_the_asked_rate_and_gaps_as_spread_as_they_are_long():
    gaps = np.diff(arrival_times(20_000, rate=5.0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_of_gaps_and_not_the_rate(burstiness):
    gaps = np.diff(arrival_times(20_000, 5.0, burstiness))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_begin_at_zero_ascend_and_scale_with_the_rate():
    slow, fast = arrival_times(50, 1.0, seed=3), arrival_times(50, 10.0, seed=3)
    assert slow[0] == 0.0 and slow == sorted(slow)
    assert np.allclose(slow, 10 * np.array(fast))
    assert slow != arrival_times(50, 1.0, seed=4)
    assert arrival_times(3, None) == [0.0, 0.0, 0.0]


def test_a_written_trace_is_read_back_as_it_was(tmp_path):
    trace = trace_of("fork-heavy")
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl", 100, seed=5) == trace


def test_a_recorded_trace_may_give_lengths_alone(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 2, "prompt_tokens": 3, "max_tokens": 4},
        {"arrival_s": 0.5, "prompt": [7, 8], "max_tokens": 1, "samples": 2},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_trace(path, 100, seed=0)
    assert first == Job(0.5, (7, 8), 1, samples=2)
    assert (second.arrival_s, len(second.prompt), second.max_tokens) == (2.0, 3, 4)
    assert read_trace(path, 100, seed=0) == (first, second) != read_trace(path, 100, seed=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one request, found none"),
        ("{", "line 1: "),
        ("[]", "line 1: expected an object, got []"),
        ('{"arrival_s": -1}', "line 1: arrival_s is -1: expected seconds >= 0"),
        ('{"arrival_s": NaN}', "line 1: arrival_s is nan: expected seconds >= 0"),
        ('{"arrival_s": 0, "max_tokens": 1}', "expected one of prompt and prompt_tokens"),
        ('{"arrival_s": 0, "prompt": [100], "max_tokens": 1}', "expected token ids from 0 to 99"),
        ('{"arrival_s": 0, "prompt": [1], "max_tokens": 0}', "max_tokens is 0: expected a whole"),
        ('{"arrival_s": 0, "prompt_tokens": "3"}', "prompt_tokens is '3': expected a whole number"),
        ('{"arrival_s": 0, "length": 3}', "unknown key 'length', expected some of arrival_s"),
    ],
)
def test_an_unusable_line_is_named(text, message, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^trace .*trace\.jsonl") as error:
        read_trace(path, 100, seed=0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_open_loop_does_not_care_what_has_ended():
    jobs = make_trace([Job(0, (1,), 1)] * 3, [0.0, 1.0, 5.0])
    source = OpenLoop(jobs)
    assert source.due(0.5) == [(0.0, jobs[0])]
    assert source.due(0.9) == [] and source.next_s() == 1.0
    assert source.due(7.0) == [(1.0, jobs[1]), (5.0, jobs[2])]  # late, but since they were due
    assert source.is_empty


def test_a_closed_loop_sends_the_next_job_when_one_has_ended():
    jobs = make_trace([Job(0, (i,), 1) for i in range(4)], [0.0] * 4)
    source = ClosedLoop(jobs, clients=2)
    assert source.due(0.0) == [(0.0, jobs[0]), (0.0, jobs[1])]
    assert source.due(1.0) == []
    source.completed()
    assert source.due(2.0) == [(2.0, jobs[2])]
    assert not source.is_empty


@pytest.mark.slow
def test_a_copying_model_repeats_its_edited_prompt():
    model, following = copying_llama(), successors(2048)
    (job,) = make_jobs(PRESETS["copy"], 2048, seed=3, requests=1)
    prompt = list(job.prompt)
    edited = sum(b != following[a] for a, b in pairwise(prompt[:-4]))
    assert prompt[-4:] == prompt[:4] and 0.05 < edited / (5 / 3) / len(prompt) < 0.1
    steps = generate_step(mx.array(prompt), model, max_tokens=40)
    text = [prompt[-1]] + [int(token) for token, _ in steps]
    assert all(b == following[a] for a, b in pairwise(text))
    assert len(set(text) & set(prompt)) > 35


def test_a_model_of_the_first_layers_has_their_weights():
    model = llama_model("tiny")
    shorter = first_layers(model, 1)
    assert (len(shorter.layers), len(model.layers)) == (1, 2)
    assert shorter.layers[0] is model.layers[0] and shorter.lm_head is model.lm_head
    assert shorter(mx.array([[1, 2]])).shape == (1, 2, 128)
