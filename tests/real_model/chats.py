"""Questions to a chat model: 16 in eight languages, from one word to an instruction with a text."""

from mlx_lm.tokenizer_utils import TokenizerWrapper

QUESTIONS = (
    "Why is the sky blue?",
    "Hi",
    "Write a haiku about memory.",
    "¿Cuál es la capital de Perú?",
    "Erkläre in zwei Sätzen, was eine Hashfunktion ist.",
    "Quelle est la différence entre une pomme et une poire ?",
    "日本の首都はどこですか。",
    "中国最长的河是哪一条?",
    "Какой самый большой океан?",
    "ما هي عاصمة مصر؟",
    "List the first 12 prime numbers, one a line.",
    "Write a Python function that returns the words of a file in the order of their counts.",
    "What is 17 * 23? Think step by step.",
    "Translate into French: the cat sleeps on the old chair 🐈.",
    "Answer with one word: is ice lighter than water?",
    "Summarize this in one sentence. A paged cache keeps the keys and values of many requests in "
    "one pool of blocks. A table of each request says which blocks are its own. A request that "
    "grows takes a free block; a request that ends gives its blocks back. Two requests with the "
    "same beginning share its blocks, and neither copies them until one of the two writes.",
)
LANGUAGES = {
    "English": 0,
    "Spanish": 3,
    "German": 4,
    "French": 5,
    "Japanese": 6,
    "Chinese": 7,
    "Russian": 8,
    "Arabic": 9,
}
"""Numbers of questions."""


def chat(tokenizer: TokenizerWrapper, question: str) -> list[int]:
    """The tokens of a chat that asks one question."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
