"""What grammars of calls allow in texts."""

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mlx_paged.formats.deepseek_dsml import DeepSeekV32
from mlx_paged.formats.grammar import Function
from mlx_paged.formats.marks import Marks
from tests.support.formats.grammars import tokenizer

DSML = DeepSeekV32.tokens[0]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}


def accepts(form, inner, text):
    """Whether the grammar of calls allows all of a text, and no more."""
    rules = form.rules([Function("f", SCHEMA)], False)
    grammar = LLMatcher.grammar_from_lark("\n".join(["start: calls", *rules]))
    matcher = LLMatcher(from_tokenizer(inner, None), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = inner.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("marks", [(DSML,), ()], ids=["a token", "text"])
@pytest.mark.parametrize("value", ["", "a", "<b>a</b>", "</", "</</b></", "</parameter>\n"])
def test_a_text_may_have_beginnings_of_its_end(value, marks):
    inner = tokenizer(marks)
    form = DeepSeekV32(Marks(inner.get_vocab()), None)
    told = f'<{DSML}parameter name="x" string="true">{value}</{DSML}parameter>\n'
    call = f'<{DSML}invoke name="f">\n{told}</{DSML}invoke>\n'
    whole = f"<{DSML}function_calls>\n{call}</{DSML}function_calls>"
    assert accepts(form, inner, whole)
    assert not accepts(form, inner, whole.replace(told, ""))
