"""What mlx-lm's evaluate says of prompts. It needs none of lm-evaluation-harness but two names."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import mlx.core as mx

CONTEXTS = ["def main():\n", "import os\nimport sys\n"]
ENDS = ["import sys\n", "for line in sys.stdin:\n", "    return 0\n"]
"""Texts whose tokens are those of the context and those of the end."""


def evaluator(model, tokenizer=None):
    """mlx-lm's own model for lm-evaluation-harness, on a model that is loaded already."""
    known = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.api.registry": {"register_model": lambda name: lambda made: made},
    }
    missing = [name for name in known if name not in sys.modules]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(known[name])
    try:
        made = object.__new__(import_module("mlx_lm.evaluate").MLXLM)
    finally:
        for name in missing:
            del sys.modules[name]
    made._model, made.tokenizer, made._max_tokens, made._batch_size = model, tokenizer, None, 8
    made.use_chat_template = False
    return made


def scores_of(model, prompt):
    """Log-probabilities of a prompt's tokens but the first, and whether each is the likeliest."""
    scores, _, is_greedy = evaluator(model)._score_fn([prompt])
    return scores[0].tolist(), is_greedy[0].tolist()


def loglikelihoods(model, tokenizer, pairs):
    """For each context and continuation the log-likelihood, and whether it is the likeliest one."""
    return evaluator(model, tokenizer).loglikelihood([SimpleNamespace(args=p) for p in pairs])


def likeliest(model, prompt, count):
    """For each position of a prompt but the last the `count` likeliest next tokens."""
    logits = model(mx.array(prompt)[None])[0, :-1]
    return mx.argsort(-logits, axis=-1)[:, :count].tolist()
