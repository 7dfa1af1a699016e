"""Every flag of mlx_lm.generate is obeyed or refused by name; and what the obeyed ones do."""

import json
import re

import mlx_lm
import pytest
from mlx_lm.generate import setup_arg_parser
from test_generate_mistakes import assert_one_line_mistake

from mlx_paged import Engine
from mlx_paged.cli import Refused, demo_model_path
from mlx_paged.generate.flags import REFUSED, make_parser
from mlx_paged.scheduler.speculation import Speculation
from tests.support.commands.generate_runs import CLASS, FUNCTION, jsonl, model_copy, read_jsonl
from tests.support.simulation.injected_drafts import every_guess

pytest_plugins = ["tests.support.commands.generate_fixtures"]

OTHER_DEFAULTS = {
    "prompt": "mlx_lm.generate takes one prompt, and has one of its own",
    "image": "none, but in a list: the flag may be repeated",
    "prefill_step_size": "a chunk runs beside streams here, so it is smaller",
}
OBEYED = {
    *("--model", "--trust-remote-code", "--adapter-path", "--extra-eos-token", "--system-prompt"),
    *("--prompt", "-p", "--prefill-response", "--max-tokens", "-m", "--temp", "--top-p", "--min-p"),
    *("--top-k", "--xtc-probability", "--xtc-threshold", "--seed", "--ignore-chat-template"),
    *("--chat-template-config", "--verbose", "--prefill-step-size", "--help", "-h"),
    *("--draft-model", "--num-draft-tokens", "--image"),
    *("--kv-bits", "--kv-group-size", "--quantized-kv-start"),
}
"""What this command has for each of them is tested here or in the other files of this folder."""


def flags_of(parser, action_class=object):
    found = [a.option_strings for a in parser._actions if isinstance(a, action_class)]
    return {flag for flags in found for flag in flags}


def test_every_flag_of_mlx_lm_is_obeyed_or_refused():
    """A new flag of mlx-lm fails this test."""
    refused = flags_of(make_parser(), Refused)
    assert refused == {flag for flags in REFUSED for flag in flags.split()}
    assert flags_of(setup_arg_parser()) == OBEYED | refused and not OBEYED & refused
    assert flags_of(make_parser()) >= OBEYED


def test_defaults_are_those_of_mlx_lm():
    ours, theirs = make_parser().parse_args([]), setup_arg_parser().parse_args([])
    shared = [name for name in vars(theirs) if hasattr(ours, name)]
    assert len(shared) > 12
    names = {name.replace("prefill_step_size", "prefill_chunk"): name for name in vars(theirs)}
    differing = {
        names[name]
        for name in names
        if hasattr(ours, name) and getattr(ours, name) != getattr(theirs, names[name])
    }
    assert differing == OTHER_DEFAULTS.keys()


@pytest.mark.parametrize("flag", [flag for flags in REFUSED for flag in flags.split()])
def test_a_refused_flag_is_named_with_its_reason(run, asked, flag):
    reason = next(reason for flags, reason in REFUSED.items() if flag in flags.split())
    for values in ((), ("2",)):
        result = run("-p", FUNCTION, flag, *values)
        assert_one_line_mistake(result, flag)
        assert result.err.endswith(f"refused: {reason}\n")
    assert not asked


def test_a_quiet_run_prints_the_text_alone(run, expected):
    for word in ("False", "f"):
        result = run("-p", FUNCTION, "-m", 12, "--verbose", word)
        assert (result.out, result.err) == (f"{expected(FUNCTION, 12)}\n", "")
    result = run("-p", FUNCTION, "-p", CLASS, "-m", 12, "--verbose", "False")
    assert expected(CLASS, 12) in result.out and result.err == ""
    assert "Generation:" in run("-p", FUNCTION, "-m", 2, "--verbose", "True").err
    message = "--verbose: expected True or False, got 'no'"
    assert_one_line_mistake(run("-p", FUNCTION, "--verbose", "no"), message)


def test_an_extra_token_ends_a_text(run, demo, expected, tmp_path):
    """Given as text and as an id; the model is loaded anew, because the flag changes it."""
    _, tokenizer = demo
    tokens = tokenizer.encode(expected(FUNCTION, 24))
    end = tokens[5]
    assert end not in tokens[:5] and end not in tokenizer.eos_token_ids
    output = tmp_path / "results.jsonl"
    options = ["--model", demo_model_path(), "-p", FUNCTION, "-m", 24, "--output", output]
    for name in (tokenizer.convert_ids_to_tokens(end), end):
        run(*options, "--extra-eos-token", name)
        (record,) = read_jsonl(output)
        assert record["tokens"] == [*tokens[:5], end] and record["finish_reason"] == "stop"


def test_an_extra_token_that_is_none_is_a_mistake(run, demo, monkeypatch):
    monkeypatch.setattr(demo[1]._tokenizer, "convert_tokens_to_ids", lambda _: None)
    result = run("-p", FUNCTION, "--extra-eos-token", "<end>")
    assert_one_line_mistake(result, "--extra-eos-token: '<end>' is not a token")


def test_an_answer_goes_on_after_the_text_it_begins_with(run, asked, chat_model, tmp_path):
    """As mlx_lm.generate puts it: the template leaves the last message open."""
    options = ["--model", chat_model, "-m", 1, "--prefill-response", "Sure:"]
    run(*options, "-p", "hello")
    lines = [{"messages": [{"role": "user", "content": "hi"}]}]
    run(*options, "--prompts-file", jsonl(tmp_path / "prompts.jsonl", lines))
    assert asked == ["# user: hello\n# assistant: Sure:", "# user: hi\n# assistant: Sure:"]
    tokenizer = mlx_lm.utils.load_tokenizer(chat_model)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Sure:"}]
    same = {"tokenize": False, "continue_final_message": True, "add_generation_prompt": False}
    assert asked[0] == tokenizer.apply_chat_template(chat, **same)


def test_arguments_of_the_template_reach_it(run, asked, tmp_path):
    template = {"chat_template": "{{ mood }}: {{ messages[-1]['content'] }}"}
    model = model_copy(tmp_path / "moody", tokenizer_config=template)
    run("--model", model, "-m", 1, "-p", "hi", "--chat-template-config", '{"mood": "glad"}')
    assert asked == ["glad: hi"]
    result = run("-p", "hi", "--chat-template-config", "[1]")
    assert_one_line_mistake(result, "--chat-template-config: expected a JSON object, got '[1]'")


def test_the_name_of_a_control_token_is_text_in_a_chat(run, demo, monkeypatch, tmp_path):
    prompts, add, tokenizer = [], Engine.add_samples, demo[1]

    def recording(engine, prompt, *args, **options):
        prompts.append(list(prompt))
        return add(engine, prompt, *args, **options)

    monkeypatch.setattr(Engine, "add_samples", recording)
    name, number = tokenizer.eos_token, tokenizer.eos_token_id
    template = {"chat_template": "{% for m in messages %}{{ m.content }}" + name + "{% endfor %}"}
    model = model_copy(tmp_path / "marked", tokenizer_config=template)
    run("--model", model, "-m", 1, "-p", f"a {name} b", "--system-prompt", name)
    run("--model", model, "-m", 1, "-p", f"a {name} b", "--ignore-chat-template")
    assert [prompt.count(number) for prompt in prompts] == [2, 1]
    assert tokenizer.decode(prompts[0]) == f"{name}{name}a {name} b{name}"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--system-prompt", "hush"), ("--prefill-response", "x"), ("--chat-template-config", "{}")],
)
def test_a_flag_of_the_template_without_one_is_a_mistake(run, flag, value):
    """The demo model has none."""
    result = run("-p", FUNCTION, flag, value)
    assert_one_line_mistake(result, f"{flag} needs a chat template, which is absent or ignored")


def test_the_prefill_step_is_the_chunk(run, tmp_path):
    path = tmp_path / "ticks.jsonl"
    run("-p", CLASS * 20, "-m", 1, "--prefill-step-size", 7, "--metrics-jsonl", path)
    assert max(tick["prefill_tokens"] for tick in read_jsonl(path)) == 7


def test_samples_at_temperature_0_are_warned_of_once(run, tmp_path):
    warning = "warning: --n or --best-of at temperature 0 gives the same text each time"
    prompts = ["-p", FUNCTION, "-p", CLASS, "-m", 2]
    for options in (["--n", 3], ["--best-of", 2]):
        err = run(*prompts, *options).err
        assert err.count(warning) == 1 and err.startswith("mlx_paged.generate: warning: ")
        assert err.split("\n")[0].endswith("--temp above 0 gives different ones")
    file = jsonl(tmp_path / "prompts.jsonl", [{"prompt": "x", "n": 2, "temperature": 0.5}])
    others = (["--n", 3, "--temp", 1], ["--beams", 2], [], ["--prompts-file", file])
    assert all(warning not in run(*prompts, *options).err for options in others)


def test_statistics_say_when_the_pool_was_full(run, tmp_path):
    path = tmp_path / "stats.json"
    prompts = ["-p", FUNCTION, "-p", CLASS, "-m", 60, "--stats-json", path]
    assert "The K/V pool" not in run(*prompts).err
    err = run(*prompts, "--kv-memory", 0.00025).err
    count = json.loads(path.read_text())["preemptions"]
    assert count > 0 and f"The K/V pool was full: requests lost their K/V {count} times" in err


def test_a_draft_model_changes_no_text_and_its_hits_are_told(run, expected, monkeypatch):
    """The demo model guesses for itself, so its guesses are right."""
    monkeypatch.setattr(Speculation, "_depths", every_guess)
    options = ["-p", FUNCTION, "-m", 40]
    result = run(*options, "--draft-model", demo_model_path(), "--num-draft-tokens", 2)
    assert result.out == f"{expected(FUNCTION, 40)}\n"
    assert re.search(r"^Drafts: (\d+) of \1 were accepted$", result.err, re.M)
    assert "Drafts: " not in run(*options).err


def test_a_completion_continues_its_prompt(run, chat_model, tmp_path):
    """Generated Python parses only if the first space of its indentation stays."""
    prompt = "def add(a, b):\n    total = a\n"
    own = [{}, {"keep_space": None}, {"keep_space": True}, {"keep_space": False}]
    lines = [{"prompt": prompt} | option for option in own]
    output = tmp_path / "results.jsonl"
    file = jsonl(tmp_path / "prompts.jsonl", lines)

    def texts(*flags: str) -> list[str]:
        run("--prompts-file", file, "-m", 8, "--output", output, "--overwrite", *flags)
        return [record["text"] for record in read_jsonl(output)]

    default, by_line, kept, dropped = texts()
    assert kept == f" {dropped}" and dropped.startswith("   ")
    assert (default, by_line) == (dropped, kept)  # the fixture has --no-keep-space
    assert texts("--keep-space") == [kept, kept, kept, dropped]
    plain = texts("--model", str(chat_model), "--ignore-chat-template")
    assert plain == [dropped, kept, kept, dropped]
