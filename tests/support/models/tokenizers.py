"""Small tokenizers of the kinds that models have, trained on a few lines."""

import json
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mlx_paged.cli import demo_model_path

CORPUS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "It isn't theirs , is it ? They 've said ' no ' . We 're here !␤A line .",
    "naïve café, Ωμέγα, 日本語 の テキスト, 🎉🦊 and 👩‍👩‍👧",
    'a = 1\n\n\tb = "two"  # three   spaces\n',
] * 4

ADDED = ("<|im_start|>", "<|im_end|>", "é", "Ġx", "▁y", " z ", "日本", "<0x41>")
"""Added tokens; the first two are special."""

KINDS = (
    "demo",
    "byte-level",
    "byte fallback",
    "byte fallback, first space kept",
    "byte fallback, cleaned",
    "words",
    "word pieces, cleaned",
    "own decode",
)


@cache
def tokenizer_of(kind: str) -> TokenizerWrapper:
    """The tokenizer of a kind, as mlx-lm wraps it."""
    if kind == "demo":
        return load_tokenizer(demo_model_path())
    if kind == "byte-level":
        return _wrapped(_byte_level(), BPEStreamingDetokenizer)
    if kind == "byte fallback":
        return _wrapped(_byte_fallback(_bpe(), 1), SPMStreamingDetokenizer)
    if kind == "byte fallback, first space kept":
        backend = _byte_fallback(_bpe(), 0)
        return _wrapped(backend, lambda x: SPMStreamingDetokenizer(x, trim_space=False))
    if kind == "byte fallback, cleaned":
        backend = _byte_fallback(_unigram(), 1)
        return _wrapped(backend, clean_up_tokenization_spaces=True)
    if kind == "words":
        return _wrapped(_words())
    if kind == "word pieces, cleaned":
        return _wrapped(_word_pieces(), clean_up_tokenization_spaces=True)
    assert kind == "own decode"
    return TokenizerWrapper(OwnDecode(tokenizer_object=_byte_level()))


class OwnDecode(PreTrainedTokenizerFast):
    """Changes what the decoder says, as tokenizers of a model's own code do."""

    def decode(self, *args: Any, **options: Any) -> str:
        return str(super().decode(*args, **options)).replace("␤", "\n")


def _wrapped(backend: Tokenizer, *detokenizer: Any, **options: Any) -> TokenizerWrapper:
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=backend, **options), *detokenizer
    )


def _with_added(backend: Tokenizer) -> Tokenizer:
    for i, content in enumerate(ADDED):
        backend.add_tokens([AddedToken(content, special=i < 2, normalized=False)])
    return backend


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _with_added(backend)


def _bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _byte_fallback(trained: Tokenizer, strip: int) -> Tokenizer:
    """With a token for each byte, as SentencePiece has. `strip` spaces at the beginning of a text
    are left out."""
    told = json.loads(trained.to_str())
    model, names = told["model"], [f"<0x{byte:02X}>" for byte in range(256)]
    if isinstance(model["vocab"], dict):
        model["vocab"] |= {name: len(model["vocab"]) + i for i, name in enumerate(names)}
    else:
        model["vocab"] += [[name, -20.0] for name in names]
    model["byte_fallback"], told["pre_tokenizer"] = True, None
    backend = Tokenizer.from_str(json.dumps(told))
    spaces = [normalizers.Prepend("▁")] * strip + [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", strip, 0)] * strip)
    return _with_added(backend)


def _words() -> Tokenizer:
    backend = _unigram()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return _with_added(backend)


def _word_pieces() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _with_added(backend)
