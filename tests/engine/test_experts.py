"""Models with experts on a CPU."""

import mlx.core as mx
import pytest

from mlx_paged import Engine, SamplingParams
from tests.support.models.architectures import VOCAB, build


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "granitemoe", "lfm2_moe"]
)
def test_models_with_experts_run_in_half_precision(name, dtype):
    """MLX's own product of experts takes float32 only on a CPU. A request's tokens do not depend on
    the requests beside it."""
    model = build(name)
    model.set_dtype(dtype)
    prompts = [[3, 5, 7, 11, 2], [9, 1], [i % VOCAB for i in range(60)]]
    params = SamplingParams(max_tokens=12)
    engine = Engine(model, None, num_blocks=64, block_size=8)
    together = [done.tokens for done in engine.generate(prompts, params)]
    alone = [engine.generate([prompt], params)[0].tokens for prompt in prompts]
    assert together == alone
