"""mlx_paged.generate with adapters of single prompts."""

from mlx_lm import load

from mlx_paged.cli import demo_model_path
from tests.support.commands.generate_runs import jsonl, read_jsonl
from tests.support.models.adapters import greedy, random_arrays, with_adapter, write_adapter

pytest_plugins = ["tests.support.commands.generate_fixtures"]


def test_prompts_have_the_tokens_of_the_adapter_that_they_name(run, tmp_path):
    """As mlx-lm's model with that adapter alone, beside prompts of the base."""
    folders = {
        name: write_adapter(tmp_path / name, random_arrays(load(demo_model_path())[0], seed))
        for seed, name in enumerate(("one", "two"))
    }
    prompts = jsonl(
        tmp_path / "prompts",
        [
            {"prompt": "def f(x):", "adapter": "one"},
            {"prompt": "def f(x):"},
            {"prompt": "def f(x):", "adapter": "two"},
        ],
    )
    output = tmp_path / "out.jsonl"
    flags = [each for name, path in folders.items() for each in ("--adapter", f"{name}={path}")]
    shape = ("--max-tokens", 8, "--model", demo_model_path(), "--ignore-chat-template")
    result = run("--prompts-file", prompts, "--output", output, *flags, *shape)
    assert result.status == 0, result.err
    lines = sorted(read_jsonl(output), key=lambda line: line["number"])
    found = [line["text"] for line in lines]
    for text, folder in zip(found, (folders["one"], None, folders["two"]), strict=True):
        model, tokenizer = load(demo_model_path())
        wanted = greedy(with_adapter(model, folder), tokenizer.encode("def f(x):"), 8)
        assert text == tokenizer.decode(wanted)
    assert len(set(found)) == 3
    used = run("-p", "def f(x):", *flags, "--use-adapter", "two", *shape)
    assert used.status == 0 and found[2] in used.out
