"""What most people's models need, which is checked before all else."""

from random import Random

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.kernels import compare
from mlx_paged.doctor.tokens import Calm, Play, report
from mlx_paged.doctor.variants import common_variants
from mlx_paged.engine.engine import Engine

HEAD_DIM, HEADS, KV_HEADS, WIDTH, LAYERS, VOCABULARY = 128, 4, 1, 256, 2, 256
LENGTHS = 100, 3, 40  # of the prompts
MAX_TOKENS, CHUNK = 12, 24
SHARPER = 1.5
"""Factor of the weights of queries and keys, so that a token attends to few others."""

TIE = 2.0**-6
"""Of bfloat16: a logit has a rounding error of up to half its range times 2**-9, and what it is
computed from has some ten such errors."""


def check_common(found: Findings, quick: bool) -> None:
    """the kernels of the demo model and of common ones; tokens of a bfloat16 model"""
    compare(common_variants(), found)
    calm = random_model()
    play = Play(Engine(calm.model, num_blocks=128, prefill_chunk=CHUNK, max_running=6), calm)
    play.run()
    report(found, play, play.engine, ("cow_clones",))


def random_model() -> Calm:
    """A bfloat16 model of four query heads for each KV head, with random weights."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    norms = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    model = Model(ModelArgs("llama", vocab_size=VOCABULARY, **sizes, **heads, **norms))
    weights = []
    for number, (name, weight) in enumerate(tree_flatten(model.parameters())):
        if weight.ndim == 2:
            scale = weight.shape[1] ** -0.5 * (
                SHARPER if "q_proj" in name or "k_proj" in name else 1
            )
            weight = scale * mx.random.normal(weight.shape, key=mx.random.key(number))
        weights.append((name, weight.astype(mx.bfloat16)))
    model.update(tree_unflatten(weights))
    tokens = Random(0)
    prompts = [[tokens.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return Calm(model, prompts, [1, 2, 3], MAX_TOKENS, TIE)
