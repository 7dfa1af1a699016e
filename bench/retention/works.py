"""Models whose operations the bench counts, by the shapes of their layers."""

from mlx_paged.kv.worth import Pairs, Work

WORKS: dict[str, Work] = {
    "SmolLM2-135M": Work(212_336_640, (Pairs(None, 4 * 30 * 9 * 64),)),
    "Llama 3.1 8B": Work(13_958_643_712, (Pairs(None, 4 * 32 * 32 * 128),)),
    "tokens": Work(1),
}
"""By name: operations of a token and of attention. `tokens`: each token takes as many."""
