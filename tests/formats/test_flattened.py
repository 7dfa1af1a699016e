"""The expression of a grammar accepts what llguidance accepts by the grammar itself."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_paged.formats.flattened import MAX_LENGTH, flattened

BYTES = LLTokenizer("byte")

PATCH = """
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
hunk: ("+" | "-" | " ") /[^\\n]*/ LF
%import common.LF
"""
GRAMMARS = {
    'start: "a" | "b" "c"': ["a", "bc", "b", "abc", ""],
    'start: ("a" | "b")+ "c"?': ["a", "abab", "abc", "c", "abcc"],
    'start: "a"~2..3 "b"~2': ["aabb", "aaabb", "abb", "aab", "aaaabb"],
    'start: ["-"] NUMBER\nNUMBER: /[0-9]+/': ["-12", "7", "--1", "-"],
    'start: word (" " word)*\nword: "x".."z" | "\u00e9"i': ["x", "x \u00e9 z", "\u00c9", "w", "x "],
    'start: "(" /a\\/b/i ")" // a comment\n# another one': ["(a/b)", "(A/B)", "a/b", "(ab)"],
    "%import common (INT, WS)\nstart: INT WS INT": ["1 2", "12 \n 3", "1", "1 x"],
    '%import common.CNAME -> NAME\nstart: NAME "=" NAME': ["a=b1", "_x=y", "1=a", "a="],
    PATCH: ["*** Begin\n+a\n*** End\n", "*** Begin\n x\n-y\n*** End", "*** Begin\n*** End"],
}


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


@pytest.mark.parametrize("lark", GRAMMARS)
def test_the_expression_accepts_the_texts_of_the_grammar(lark):
    expression = LLMatcher.grammar_from_regex(flattened(lark))
    found = {text: accepts(expression, text) for text in GRAMMARS[lark]}
    assert found == {t: accepts(LLMatcher.grammar_from_lark(lark), t) for t in GRAMMARS[lark]}
    assert len(set(found.values())) == 2  # some of them are texts of the grammar, and some are not


DOUBLED = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
REFUSED = {
    'start: "a" start?': "contains itself",
    'start: a\na: "x" b\nb: a': "contains itself",
    "start: a": "not defined",
    "start: %json {}": "no expression",
    "%import other.X\nstart: X": "not known",
    '%import common (INT\nstart: "a"': ": is no name of an import",
    'start: "a"~x': "a number of repetitions is missing",
    'start: ("a"': "[)] is missing",
    'start: "ab".."c"': "needs two characters",
    "start: /a/ ; b": "';' has no expression",
    f'start: r0\n{DOUBLED}\nr40: "ab"': "too long",
    'start: "a"' + " | r" * 9000 + '\nr: "abcdefgh"': "too long",
    'start: "a"' + "+" * (MAX_LENGTH - 20): "too long",
    "start: " + "(" * 30000: "nested too deeply",
    'start: "a"' + " " * MAX_LENGTH: "too long",
}


@pytest.mark.parametrize("lark", REFUSED, ids=lambda lark: lark[:30])
def test_what_has_no_expression_is_refused_with_a_reason(lark):
    with pytest.raises(ValueError, match=REFUSED[lark]):
        flattened(lark)
