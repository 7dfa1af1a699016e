"""Tiny models with the marks of a family, and a server whose model says what a request scripts."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged.protocol import prompts
from tests.support.commands.server_harness import post, running
from tests.support.models.tiny_models import tiny_model

END = "<|end_of_text|>"
TURNS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}CALLS\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>OPEN{% endif %}"
)
CALLS = {
    "json_tools": (
        '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>\n{% endfor %}'
    ),
    "qwen3_coder": (
        "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
}
"""How a template of a family writes calls."""

CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 or m.content %}"
    "{{ raise_exception('not one call alone') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>"
    "commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif loop.first or m.role in ('user', 'tool') %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "Reasoning: {{ reasoning_effort or 'medium' }}"
    "{% for t in tools or [] %}{{ '// ' + t.function.description + t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Of Harmony: it refuses what the template of gpt-oss refuses."""


def template(family, opened=""):
    """The template of a family; its generation prompt ends with the text `opened`."""
    return TURNS.replace("CALLS", CALLS[family]).replace("OPEN", opened)


@lru_cache
def folder(chat_template, marks=()):
    """The folder of a model whose tokens are bytes and `marks`."""
    path = Path(mkdtemp())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *marks])
    options = {"eos_token": END, "chat_template": chat_template}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(path)
    size = tokenizer.get_vocab_size()
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": size,
        "max_position_embeddings": 32768,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    weights = dict(tree_flatten(tiny_model("qwen3", **config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    return path


@contextmanager
def scripted(chat_template, marks=(), *flags):
    """A server whose model says what the `metadata` of a request have as ``script``."""
    plain = prompts.sampling

    def forced(model, prompt, fields, args):
        params = plain(model, prompt, fields, args)
        said = (fields["body"].get("metadata") or {}).get("script")
        if said is None:
            return params
        ends = min(model.tokenizer.eos_token_ids)
        script = [*model.tokenizer.encode(said, add_special_tokens=False), ends]

        def choose(tokens, logits):
            token = script[min(tokens.size - len(prompt.tokens), len(script) - 1)]
            chosen = mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)
            return chosen[None].astype(logits.dtype)

        return replace(params, logits_processors=(choose, *params.logits_processors))

    path = folder(chat_template, tuple(marks))
    prompts.sampling = forced
    try:
        with running("--model", str(path), "--port", "0", "--kv-memory", "0.05", *flags) as server:
            yield server
    finally:
        prompts.sampling = plain


def chat(server, script=None, **fields):
    """The message of a chat completion, streamed and whole alike, and its finish reason."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 600, "temperature": 0}
    body |= {"metadata": {"script": script}} if script is not None else {}
    status, _, answer = post(server, body | fields, "/v1/chat/completions")
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice["message"], choice["finish_reason"]


def called(message):
    """Names and arguments of the calls of a message."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]
