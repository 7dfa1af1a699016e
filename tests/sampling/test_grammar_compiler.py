"""Grammars that cannot be compiled, or not in time, are refused; masks are made for few rows."""

import re
import threading

import pytest

from mlx_paged import Engine, EngineService, SamplingParams
from mlx_paged.sampling import grammar as compiler
from mlx_paged.sampling import sampler
from tests.support.commands.server_harness import demo
from tests.support.engine.structured_runs import PROMPTS, make_engine, run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a", "grammar": "b"}, "regex and grammar are given"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos is True beside regex"),
        ({"regex": ""}, "regex is ''"),
        ({"json_schema": 3}, "json_schema is 3"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"grammar": "start: nowhere"}, "grammar: "),
        ({"regex": "b" * 70_000}, "expected at most 65536"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_refused_and_nothing_is_added(options, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.add_request(PROMPTS[0], **options)
    assert not engine.has_work


def test_a_grammar_needs_a_tokenizer():
    engine = Engine(demo()[0], num_blocks=8, prewarm=False)
    with pytest.raises(ValueError, match="expected a tokenizer"):
        engine.add_request([1, 2], regex="a")


def test_a_service_compiles_in_the_thread_of_its_caller(monkeypatch):
    threads = []
    whole = compiler.Grammars._compile

    def noted(self, kind, source):
        threads.append(threading.current_thread())
        return whole(self, kind, source)

    monkeypatch.setattr(compiler.Grammars, "_compile", noted)
    with EngineService(make_engine()) as service:
        ticket = service.submit(PROMPTS[0], regex="[ab]{4}", max_tokens=9)
        assert re.fullmatch("[ab]{4}", ticket.result(60).text)
    assert threads == [threading.current_thread()]


def test_a_long_chain_of_rules_is_compiled():
    """It needs a stack that most threads do not have."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(5000))
    (completion,) = make_engine().generate(
        [PROMPTS[0]], grammar=f'start: r0\n{rules}\nr5000: "ab"', max_tokens=9
    )
    assert completion.text == "ab"


def test_a_source_that_takes_too_long_is_refused_and_others_are_not(monkeypatch):
    from llguidance import LLMatcher

    may_end = threading.Event()

    class Slow:
        """llguidance's class, which needs a while for some sources."""

        def __new__(cls, tokens, grammar, **options):
            if "slow" in grammar:
                may_end.wait()
            return LLMatcher(tokens, grammar, **options)

        grammar_from_regex = LLMatcher.grammar_from_regex

    monkeypatch.setattr("llguidance.LLMatcher", Slow)
    grammars = compiler.Grammars(demo()[1], None)
    grammars.compile(SamplingParams(regex="fast"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "MAX_SECONDS", 0.01)
        for _ in range(2):
            for name in ("slow", "slower"):
                with pytest.raises(ValueError, match="takes more than"):
                    grammars.compile(SamplingParams(regex=name))
    grammars.compile(SamplingParams(regex="fast"))
    with pytest.raises(RuntimeError, match="busy"):
        grammars.compile(SamplingParams(regex="faster"))
    late = list(grammars._late)
    assert len(late) == compiler.MAX_LATE
    may_end.set()
    for thread in late:
        thread.join()
    grammars.compile(SamplingParams(regex="faster"))


def test_masks_are_made_for_the_constrained_rows_alone(monkeypatch):
    made = []
    whole = sampler.masks_of

    def noted(rows, vocab):
        masks = whole(rows, vocab)
        made.append(masks[0].shape[0])
        assert made[-1] == len(rows)
        return masks

    monkeypatch.setattr(sampler, "masks_of", noted)
    requests = [(prompt, {"max_tokens": 12, "ignore_eos": True}) for prompt in PROMPTS]
    alone = [c.tokens for c in run(make_engine(), requests)[0]]
    assert not made
    bound = {"regex": "[a-z]{5,}", "max_tokens": 12}
    done, *_ = run(make_engine(), [requests[0], (PROMPTS[1], bound), *requests[1:]])
    assert [c.tokens for c in done[:1] + done[2:]] == alone
    assert len(made) >= 12 and set(made) == {1}


def test_logits_may_be_wider_than_the_vocabulary():
    """Models pad their output; no grammar allows such a token."""
    grammars = compiler.Grammars(demo()[1], None)
    tokens = [1, 2, 3]
    state = grammars.start(SamplingParams(regex="[ab]+"), len(tokens))
    bits, *_ = compiler.masks_of([compiler.Row(1, state, tokens, 3)], 1792 + 77)
    assert bits.shape == (1, 59)
    assert bits.any() and not bits[0, 1792 // 32 :].any()


def test_words_that_are_no_keywords_of_json_schema_are_ignored():
    engine = make_engine()
    engine.add_request(PROMPTS[0], json_schema={"type": "integer", "maximun": 9, "x-note": "a"})
    assert engine.has_work
