"""``python -m mlx_paged.generate`` as a user sees it: prompts, text, files, statistics."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_paged.generate import command as generate
from mlx_paged.generate.__main__ import main
from tests.support import TIMEOUT
from tests.support.commands.generate_runs import (
    CLASS,
    FUNCTION,
    LONG,
    PROMPTS,
    ROOT,
    RULE,
    command,
    jsonl,
    read_jsonl,
)

pytest_plugins = ["tests.support.commands.generate_fixtures"]


def test_one_prompt_shows_what_mlx_lm_shows_and_more(run, demo, expected, capsys):
    """Only the text is on stdout. The lines on stderr differ from mlx-lm's in numbers only."""
    mlx_lm.generate(*demo, FUNCTION, verbose=True, max_tokens=24)
    shown = re.sub(r"\d+\.\d+", "#", capsys.readouterr().out)
    result = run("--prompt", FUNCTION, "--max-tokens", 24)
    told = re.sub(r"\d+\.\d+", "#", result.err).splitlines()
    added = [line for line in told if line.startswith(("First token:", "K/V:", "memory:"))]
    theirs = shown.replace(f"{expected(FUNCTION, 24)}\n", "").splitlines()
    assert [line for line in told if line not in added] == theirs
    assert len(added) == 3
    assert result.status == 0 and result.out == f"{expected(FUNCTION, 24)}\n"


def test_one_prompt_is_printed_as_its_tokens_come(run, expected, monkeypatch):
    class Screen(io.StringIO):
        """Keeps the text that is visible after each flush."""

        def __init__(self) -> None:
            super().__init__()
            self.views: list[str] = []

        def flush(self) -> None:
            self.views.append(self.getvalue())

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    run("-p", FUNCTION, "-m", 24)
    text = expected(FUNCTION, 24)
    streamed = {view for view in screen.views if text.startswith(view)}
    assert len(streamed) > 15
    assert text in streamed


def test_many_prompts_print_their_texts_in_input_order(run, expected):
    prompts = [FUNCTION, CLASS, LONG]
    result = run(*(f"--prompt={prompt}" for prompt in prompts), "--max-tokens", 24)
    titles = [" ".join(prompt.split())[:70] for prompt in prompts]
    assert result.out == "".join(
        f"{RULE} {number}/3: {title}\n{expected(prompt, 24)}\n"
        for number, (title, prompt) in enumerate(zip(titles, prompts, strict=True), start=1)
    )
    assert result.status == 0 and f"{RULE}\nPrompt: " in result.err


def test_the_order_is_kept_when_the_first_prompt_takes_longest(run, expected, tmp_path):
    lines = [{"prompt": FUNCTION, "max_tokens": 24}, {"prompt": CLASS, "max_tokens": 2}]
    result = run("--prompts-file", jsonl(tmp_path / "prompts.jsonl", lines))
    first = result.out.index(f"1/2: {FUNCTION}\n{expected(FUNCTION, 24)}\n")
    assert first < result.out.index(f"2/2: {CLASS}\n{expected(CLASS, 2)}\n")


def test_prompts_come_from_options_then_from_the_file(run, tmp_path):
    file = jsonl(tmp_path / "prompts.jsonl", [{"prompt": LONG}])
    result = run("--prompts-file", file, "-p", FUNCTION, "-p", CLASS, "-m", 2)
    headings = re.findall(rf"{RULE} (\d/3: .{{5}})", result.out)
    assert headings == ["1/3: def m", "2/3: class", "3/3: impor"]


def test_a_typed_newline_or_tab_is_the_character(run, asked):
    run("-p", r"try:\n\timport os", "-p", "try:\n\timport os", "-m", 1)
    assert asked == ["try:\n\timport os"] * 2


def test_a_dash_reads_the_prompt_from_stdin(run, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(LONG))
    assert run("-p", "-", "-m", 12).out == f"{expected(LONG, 12)}\n"


def test_a_stop_string_ends_the_text(run, expected):
    text = expected(FUNCTION, 24)
    stop = text[len(text) // 2 :][:6]
    before = text.split(stop)[0]
    result = run("-p", FUNCTION, "-m", 24, "--stop", "never there", "--stop", stop)
    assert result.out == f"{before}\n"


def test_a_seed_repeats_a_sampled_run(run):
    def sampled(seed: int) -> str:
        return run("-p", FUNCTION, "-p", FUNCTION, "-m", 24, "--temp", 1, "--seed", seed).out

    assert sampled(1) == sampled(1) != sampled(2)


def test_requests_of_one_run_are_sampled_independently(run, tmp_path):
    output = tmp_path / "results.jsonl"
    run(*["-p", FUNCTION] * 3, "-m", 16, "--temp", 1, "--seed", 1, "--output", output)
    assert len({entry["text"] for entry in read_jsonl(output)}) == 3


@pytest.mark.slow
def test_a_line_with_a_seed_gets_its_text_in_any_company(run, tmp_path):
    line = {"prompt": FUNCTION, "seed": 3, "temp": 0.9, "top_p": 0.95, "max_tokens": 24}
    output = tmp_path / "results.jsonl"

    def text_among(*others: dict[str, Any]) -> str:
        file = jsonl(tmp_path / "prompts.jsonl", [*others, line])
        run("--prompts-file", file, "--output", output, "--overwrite")
        return read_jsonl(output)[-1]["text"]

    alone = text_among()
    assert alone == text_among({"prompt": LONG, "temp": 1.5}, {"prompt": CLASS})


def test_sampling_options_reach_the_requests(run, expected):
    """Each of these options keeps only the most likely token at any temperature."""
    greedy = expected(FUNCTION, 12)
    for option in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1]):
        assert greedy in run("-p", FUNCTION, "-m", 12, "--temp", 100, *option).out


def test_a_line_may_have_options_of_its_own(run, expected, tmp_path):
    text = expected(CLASS, 24)
    stop = text[10:14]
    lines = [
        {"prompt": FUNCTION, "id": "a"},
        {"prompt": FUNCTION, "id": "b", "max_tokens": 5},
        {"prompt": CLASS, "id": "c", "stop": stop, "max_tokens": 24},
        {"prompt": FUNCTION, "id": "d", "temperature": 50, "seed": 1},
    ]
    output = tmp_path / "results.jsonl"
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    run("--prompts-file", file, "--max-tokens", 9, "--output", output)
    results = {entry["id"]: entry for entry in read_jsonl(output)}
    assert results["a"]["text"] == expected(FUNCTION, 9)
    assert results["b"]["text"] == expected(FUNCTION, 5)
    assert results["c"]["text"] == text.split(stop)[0]
    assert results["c"]["finish_reason"] == "stop"
    assert results["d"]["text"] != expected(FUNCTION, 9)


def test_results_are_written_as_jsonl_in_input_order(run, demo, expected, tmp_path):
    output = tmp_path / "results.jsonl"
    lines = [{"prompt": LONG, "id": 0}, {"prompt": "naïve = '日本'"}]
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    run("--prompts-file", file, "-m", 12, "--output", output)
    first, second = read_jsonl(output)
    assert first["id"] == 0 and "id" not in second
    for entry, line in ((first, lines[0]), (second, lines[1])):
        tokens, prompt = entry["tokens"], line["prompt"]
        assert entry["prompt"] == prompt
        assert entry["text"] == expected(prompt, 12)
        assert entry["prompt_tokens"] == len(demo[1].encode(prompt))
        assert entry["generation_tokens"] == len(tokens) == len(entry["logprobs"])
        assert max(entry["logprobs"]) <= 0
        assert entry["finish_reason"] == ("length" if len(tokens) == 12 else "stop")
        assert 0 < entry["ttft_s"] <= entry["seconds"]
    assert "日本" in output.read_text(encoding="utf-8")  # not as \u escapes


def test_results_replace_those_of_an_earlier_run(run, tmp_path):
    output = tmp_path / "results.jsonl"
    for prompt in (FUNCTION, CLASS):
        run("-p", prompt, "-m", 2, "--output", output, "--overwrite")
    assert [entry["prompt"] for entry in read_jsonl(output)] == [CLASS]


def test_statistics_count_what_was_done(run, demo, tmp_path):
    path = tmp_path / "stats.json"
    prompts = [FUNCTION, CLASS, LONG]
    run(*(f"--prompt={prompt}" for prompt in prompts), "-m", 9, "--stats-json", path)
    stats = json.loads(path.read_text())
    lengths = [len(demo[1].encode(prompt)) for prompt in prompts]
    assert stats["requests_finished"] == 3
    assert stats["prompt_tokens"] == sum(lengths)
    assert stats["generation_tokens"] == 3 * 9
    assert stats["steps"] == 9  # all prompts fit in the first one
    assert stats["cached_prompt_tokens"] == stats["preemptions"] == stats["cow_clones"] == 0
    assert stats["peak_running"] == 3
    # The last token needs no K/V.
    assert stats["peak_live_tokens"] == sum(lengths) + 3 * 8
    assert stats["peak_blocks_in_use"] == sum(math.ceil((n + 8) / 16) for n in lengths)


def test_statistics_keep_the_peaks_of_the_run(run, demo, tmp_path):
    """The second step holds the most tokens; then the long prompt ends."""
    path = tmp_path / "stats.json"
    lines = [{"prompt": LONG, "max_tokens": 2}, {"prompt": FUNCTION, "max_tokens": 9}]
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    run("--prompts-file", file, "--stats-json", path)
    stats = json.loads(path.read_text())
    lengths = [len(demo[1].encode(line["prompt"])) + 1 for line in lines]
    assert stats["generation_tokens"] == 2 + 9
    assert stats["peak_running"] == 2
    assert stats["peak_live_tokens"] == sum(lengths)
    assert stats["peak_blocks_in_use"] == sum(math.ceil(length / 16) for length in lengths)


def test_statistics_of_memory_fit_together(run, tmp_path):
    path = tmp_path / "stats.json"
    run("-p", FUNCTION, "-p", LONG, "-m", 9, "--stats-json", path, "--kv-block-size", 8)
    stats = json.loads(path.read_text())
    assert stats["block_size"] == 8
    assert stats["blocks_in_use"] == 0
    assert 0 < stats["peak_blocks_in_use"] <= stats["num_blocks"]
    assert stats["kv_pool_bytes"] == stats["num_blocks"] * stats["block_bytes"] <= 0.02e9
    assert stats["peak_live_kv_bytes"] <= stats["peak_kv_bytes"]
    assert stats["peak_kv_bytes"] < stats["contiguous_kv_bytes"] <= stats["padded_kv_bytes"]


def test_statistics_of_time_fit_together(run, tmp_path):
    path = tmp_path / "stats.json"
    run("-p", FUNCTION, "-p", LONG, "-m", 9, "--stats-json", path)
    stats = json.loads(path.read_text())
    assert 0 < stats["prefill_seconds"] < stats["seconds"]
    assert 0 < stats["ttft_median_s"] <= stats["ttft_max_s"]
    assert 0 < stats["decode_seconds"] < stats["seconds"]
    speed = stats["generation_tokens"] / stats["decode_seconds"]
    assert stats["generation_tokens_per_sec"] == pytest.approx(speed)
    speed = stats["prompt_tokens"] / stats["prefill_seconds"]
    assert stats["prompt_tokens_per_sec"] == pytest.approx(speed)


def test_a_prompt_that_was_seen_is_not_computed_again(run, demo, expected, tmp_path):
    path = tmp_path / "stats.json"
    result = run("-p", LONG, "-p", LONG, "-m", 9, "--max-running", 1, "--stats-json", path)
    stats = json.loads(path.read_text())
    length = len(demo[1].encode(LONG))
    cached = (length - 1) // 16 * 16  # whole blocks, the last token always being computed
    assert stats["peak_running"] == 1
    assert stats["cached_prompt_tokens"] == cached
    assert stats["prompt_tokens"] == 2 * length - cached
    assert result.out.count(expected(LONG, 9)) == 2


@pytest.mark.slow
def test_a_pool_too_small_for_all_prompts_delays_some(run, expected, tmp_path):
    stats, output = tmp_path / "stats.json", tmp_path / "results.jsonl"
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    run("--kv-memory", 0.0006, *prompts, "-m", 32, "--stats-json", stats, "--output", output)
    stats = json.loads(stats.read_text())
    assert stats["peak_running"] < len(PROMPTS) or stats["preemptions"] > 0
    assert [r["text"] for r in read_jsonl(output)] == [expected(p, 32) for p in PROMPTS]


def test_the_pool_is_as_large_as_the_prompts_need(demo, monkeypatch, tmp_path):
    """This is the size without --kv-memory."""
    path = tmp_path / "stats.json"
    monkeypatch.setattr(generate, "load_model", lambda *args: demo)
    main(["-p", FUNCTION, "-p", LONG, "-m", "9", "--stats-json", str(path)])
    stats = json.loads(path.read_text())
    needed = stats["prompt_tokens"] + 2 * 9
    assert needed <= stats["num_blocks"] * 16 <= needed + 5 * 16
    assert stats["preemptions"] == 0 and stats["peak_running"] == 2


def test_a_long_prompt_is_computed_in_chunks(run, demo, tmp_path):
    path = tmp_path / "stats.json"
    run("-p", LONG, "-m", 1, "--prefill-chunk", 7, "--stats-json", path)
    stats = json.loads(path.read_text())
    assert stats["steps"] == math.ceil(len(demo[1].encode(LONG)) / 7)
    assert stats["generation_tokens"] == 1


@pytest.mark.sampled(9)
@pytest.mark.parametrize("chunk", [7, 64, 512], ids="chunk{}".format)
@pytest.mark.parametrize("block_size", [8, 16, 32], ids="block{}".format)
def test_block_size_and_chunk_change_no_text(run, demo, expected, tmp_path, block_size, chunk):
    file = jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    output, path = tmp_path / "results.jsonl", tmp_path / "stats.json"
    shape = ["--kv-block-size", block_size, "--prefill-chunk", chunk]
    files = ["--prompts-file", file, "--output", output, "--stats-json", path]
    result = run(*files, "--max-tokens", 64, "--temp", 0, *shape)
    texts = [expected(prompt, 64) for prompt in PROMPTS]
    assert result.status == 0
    assert [entry["text"] for entry in read_jsonl(output)] == texts
    stats = json.loads(path.read_text())
    assert stats["block_size"] == block_size
    assert stats["peak_running"] > 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-p", "hello"], "# user: hello\n# assistant:\n"),
        (
            ["-p", "hello", "--system-prompt", "hush"],
            "# system: hush\n# user: hello\n# assistant:\n",
        ),
        (["-p", "hello", "--ignore-chat-template"], "hello"),
    ],
    ids=["template", "system prompt", "template ignored"],
)
def test_a_prompt_goes_through_the_models_chat_template(run, asked, chat_model, options, text):
    run("--model", chat_model, "-m", 1, *options)
    assert asked == [text]


def test_a_line_of_messages_is_a_chat(run, asked, chat_model, tmp_path):
    def message(role: str, content: Any) -> dict[str, Any]:
        return {"role": role, "content": content}

    lines = [
        {"messages": [message("user", "hello")]},
        {"messages": [message("system", "shout"), message("user", "hello")]},
        {"messages": [message("user", [{"type": "text", "text": "hello"}])]},
    ]
    output = tmp_path / "results.jsonl"
    options = ["-m", 1, "--system-prompt", "hush", "--output", output]
    run("--model", chat_model, "--prompts-file", jsonl(tmp_path / "p.jsonl", lines), *options)
    end = "# user: hello\n# assistant:\n"
    assert asked == [f"# system: {text}\n{end}" for text in ("hush", "shout", "hush")]
    results = read_jsonl(output)
    assert [entry["messages"] for entry in results] == [line["messages"] for line in lines]
    assert all("prompt" not in entry for entry in results)


@pytest.mark.slow
def test_the_command_runs_the_demo_model_on_a_prompt_from_stdin(expected):
    done = subprocess.run(
        command("--prompt", "-", "--max-tokens", 24),
        input=LONG,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0 and done.stdout == f"{expected(LONG, 24)}\n"
    memory, _, rest = done.stderr.partition("\n")
    assert memory.startswith("memory: at most 0.")
    assert " GB (weights 0.00 + pool 0.05 + " in memory
    assert rest.startswith(f"{RULE}\n{RULE}\nPrompt: ")


@pytest.mark.slow
def test_where_both_streams_go_to_one_place_the_statistics_come_last(expected):
    """This also holds for a pipe, where Python buffers stdout."""
    prompts = [f"--prompt={prompt}" for prompt in (FUNCTION, CLASS)]
    done = subprocess.run(
        command(*prompts, "-m", 3),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"},
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT,
    )
    assert f"2/2: {CLASS}\n{expected(CLASS, 3)}\n{RULE}\nPrompt: " in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("-p", FUNCTION, "-m", 3, "--verbose", "False"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=TIMEOUT,
        )
    assert done.returncode == 1
    assert done.stderr == "mlx_paged.generate: error: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_a_reader_that_closes_stdout_gets_no_traceback():
    with subprocess.Popen(
        command("-p", FUNCTION, "-m", 300, "--verbose", "False"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
