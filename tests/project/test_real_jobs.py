"""The edits that scripts.speculation asks for, and answers that are forced."""

import pytest

from mlx_paged.loading import load_model
from scripts.real_jobs import Forced, names, tasks
from scripts.speculation import make_engine


class ChatTokenizer:
    """The demo model's tokenizer, with a template that adds nothing."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages, add_generation_prompt):
        return self._tokenizer.encode(messages[0]["content"], add_special_tokens=False)


@pytest.fixture(scope="module")
def demo():
    model, tokenizer = load_model(None)
    return model, ChatTokenizer(tokenizer)


def test_an_answer_is_the_file_with_another_name(demo):
    _, tokenizer = demo
    (prompt, answer), *_ = tasks(tokenizer, 3)
    asked, edited = tokenizer.decode([*prompt]), tokenizer.decode([*answer])
    new = asked.split(" to `")[1].split("`")[0]
    source = asked.split("```python\n")[1].split("```")[0]
    assert new in edited and new not in source
    whole_lines = edited.rpartition("\n")[0]  # the answer may end within a name
    assert whole_lines and source.startswith(whole_lines.replace(new, new.removeprefix("renamed_")))


def test_names_are_no_keywords():
    assert names("self.rows(rows) return return return total") == ["rows", "total"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fixed4"])
def test_a_forced_engine_says_the_answers(demo, kind):
    model, tokenizer = demo
    answers = {prompt: answer[:80] for prompt, answer in tasks(tokenizer, 3)}
    engine = make_engine(kind, model, 1, kv_memory=1 << 27)
    engine.runner.sampler = Forced(engine.runner.sampler, answers)
    ids = [engine.add_request([*p], max_tokens=80, ignore_eos=True) for p in answers]
    said = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            said[output.request_id].append(output.token)
    assert [tuple(said[request_id]) for request_id in ids] == [*answers.values()]
    assert (engine.stats.accepted_drafts > 60) == (kind != "plain")
