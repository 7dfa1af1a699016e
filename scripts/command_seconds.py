"""Prints how long a GPU's longest command buffer takes by estimate, as docs/on-a-mac.md has it.

python -m scripts.command_seconds
"""

from mlx_paged.command_buffers import MOST_ELEMENTS
from mlx_paged.scheduler.budget import MIN_CHUNK
from mlx_paged.scheduler.command_bound import CommandBound
from mlx_paged.scheduler.step import StepWork

CONTEXTS = 8192, 32_768, 131_072
CHUNKS = 512, 2048  # tokens of a step beside others, and of a prompt alone
ELEMENTS_OF_WORD = 8  # of weights in 4 bits in an element that MLX binds


def bound(
    layers: int, hidden: int, heads: int, kv_heads: int, dim: int, inner: int, experts: int, of: int
) -> CommandBound:
    """The bound of a model in 4 bits. `experts` of so many compute a token; 1 of 1: no router."""
    outputs = [heads * dim, kv_heads * dim, kv_heads * dim]
    products = [hidden * width for width in outputs] + [heads * dim * hidden]
    mlp = [experts * hidden * inner] * 3
    router = [hidden * of] if of > 1 else []
    stored = sum(products) + of * 3 * hidden * inner
    widths = sum(outputs) + 2 * hidden + experts * (2 * inner + hidden) - hidden
    return CommandBound(
        layers=layers,
        weights=sum(products + mlp + router),
        largest=max(products + mlp),
        pair=4 * heads * dim,
        stored=stored / ELEMENTS_OF_WORD,
        widths=widths,
        buffer=MOST_ELEMENTS << 20,
    )


MODELS = {
    "Llama 3.2 1B": bound(16, 2048, 32, 8, 64, 8192, 1, 1),
    "Llama 3.1 8B": bound(32, 4096, 32, 8, 128, 14_336, 1, 1),
    "Qwen3 30B-A3B": bound(48, 2048, 32, 4, 128, 768, 8, 128),
}


def rows() -> list[str]:
    """The rows of the table, in Markdown."""
    found = []
    for name, model in MODELS.items():
        for context in CONTEXTS:
            cells = [name, f"{context:,}"]
            for chunk in CHUNKS:
                start = context - chunk
                before = model.seconds(StepWork.chunk(start, chunk))
                tokens = model.chunk_within(StepWork(), start, chunk, MIN_CHUNK)
                after = model.seconds(StepWork.chunk(start, tokens))
                cells += [f"{before:.2f}", f"{tokens:,}", f"{after:.2f}"]
            found.append("| " + " | ".join(cells) + " |")
    return found


def main() -> None:
    """Print the table."""
    heads = ["model", "context"]
    for chunk in CHUNKS:
        heads += [f"{chunk:,} tokens, s", "bounded to", "s"]
    print("| " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * (len(heads) - 1))
    print("\n".join(rows()))


if __name__ == "__main__":
    main()
