"""The doctor counts the drafts that are right, and finds tokens that drafts have changed."""

import pytest

from mlx_paged import demo_model_path
from mlx_paged.doctor import acceptance, tokens
from mlx_paged.doctor.__main__ import main
from mlx_paged.doctor.findings import Findings, run_check
from mlx_paged.doctor.tokens import Calm
from mlx_paged.loading import load_model
from tests.support.models.eagle3_files import write_head


def test_a_model_with_a_head_is_compared_with_mlx_lm(tmp_path):
    model, tokenizer = load_model()
    width = model.args.hidden_size
    write_head(tmp_path, target_width=width, vocab_size=model.args.vocab_size)
    found = Findings("acceptance")
    options = {"speculate": "ngram", "draft_head": str(tmp_path)}
    acceptance.check_acceptance_of(found, True, model, tokenizer, options)
    assert not found.failures and list(found.numbers) == ["n-grams and a head"]
    numbers = found.numbers["n-grams and a head"]
    assert numbers["tokens"] == 2 * 16 * 12  # rounds, tokens of an answer, prompts and forks
    assert sum(computed for computed, _ in numbers["drafts_by_depth"]) == numbers["drafts"]


def test_tokens_that_differ_from_mlx_lms_fail(monkeypatch):
    right = Calm._answer

    def wrong(self, prompt):
        known, rows = right(self, prompt)
        return [*known[:-1], known[-1] ^ 1], [-row for row in rows]

    monkeypatch.setattr(Calm, "_answer", wrong)
    monkeypatch.setattr(tokens, "demo_model", tokens.demo_model.__wrapped__)
    found = run_check(Findings("acceptance"), acceptance.check_acceptance, True)
    assert {failure.split(":")[0] for failure in found.failures} == {"n-grams", "a draft model"}
    assert found.num_wrong == len(found.failures) > 0


@pytest.mark.parametrize(
    ("depths", "text"),
    [
        ([], "no drafts: the scheduler expects no gain of them here"),
        ([[4, 3], [2, 0]], "3 of 6 drafts accepted (50 %); by depth: 3 of 4, 0 of 2"),
    ],
)
def test_the_page_counts_drafts_by_depth(depths, text):
    assert acceptance.accepted(depths) == text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "m"], "--model is given: expected --only acceptance beside it"),
        (["--only", "acceptance", "--kv-bits", "8"], "--kv-bits is given: expected --model"),
        (["--only", "tokens", "--draft-head", "h"], "--draft-head is given: expected --only"),
        (["--only", "acceptance", "--model", "/none"], "model /none: no such directory"),
        (
            ["--only", "acceptance", "--model", str(demo_model_path()), "--draft-head", "/none"],
            "--draft-head /none: no such file or directory",
        ),
    ],
)
def test_a_wrong_flag_gives_one_line(capsys, arguments, problem):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    out, err = capsys.readouterr()
    assert problem in err and err.count("\n") == 1 and not out


def test_a_given_model_is_tried(capsys):
    assert main(["--only", "acceptance", "--quick", "--model", str(demo_model_path())]) == 0
    page = capsys.readouterr().out
    assert "\n  n-grams: 384 tokens, 0 ties, " in page and "draft model" not in page
