"""kv_bits of an engine and of the commands: what is stored, counted and refused."""

from itertools import product

import mlx.core as mx
import pytest

from mlx_paged import BatchGenerator, Engine, KVBlockManager
from mlx_paged.kv.shapes import KVShape
from mlx_paged.server import flags as server_flags
from tests.support.models.tiny_models import VOCAB, tiny_model
from tests.support.ops.numpy_quantization import BITS

PROMPTS = [[i % VOCAB for i in range(start, start + 40)] for start in (3, 50)]


@pytest.mark.parametrize(("kv_bits", "part"), [(8, 0.508), (6, 0.383), (4, 0.333)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_bytes_of_a_token_at_128_dimensions(kv_bits, part, dtype):
    plain = KVShape(8, 128, 128, dtype)
    quantized = plain.quantized("test", kv_bits)
    assert quantized.token_bytes <= part * plain.token_bytes
    assert quantized.token_bytes == quantized.scale_bytes + 8 * {8: 256, 6: 192, 4: 160}[kv_bits]
    manager = KVBlockManager(2, 8, 128, 16, 5, dtype=dtype, kv_bits=kv_bits)
    arrays = [*manager.k, *manager.v, *manager.scales["k_scales"], *manager.scales["v_scales"]]
    assert sum(array.nbytes for array in arrays) == manager.pool.nbytes
    assert manager.pool.nbytes == 2 * 5 * 16 * quantized.token_bytes


@pytest.mark.parametrize("kv_bits", BITS)
def test_a_budget_holds_more_tokens(kv_bits):
    model = tiny_model("llama")
    plain = Engine(model, kv_memory=1 << 20)
    engine = Engine(model, kv_memory=1 << 20, kv_bits=kv_bits)
    ratio = plain.stats.block_bytes / engine.stats.block_bytes
    assert ratio > 3  # of float32
    assert engine.stats.num_blocks == pytest.approx(plain.stats.num_blocks * ratio, rel=0.01)
    assert engine.stats.num_blocks * engine.stats.block_bytes <= 1 << 20
    engine.generate(PROMPTS, max_tokens=4)
    found = engine.metrics()
    assert found["block_bytes"] == engine.manager.pool.block_bytes
    assert 3 * found["peak_live_kv_bytes"] < 2 * 44 * plain.stats.block_bytes / 16


def test_the_batch_generator_takes_kv_bits():
    model = tiny_model("llama")
    generator = BatchGenerator(model, kv_bits=8, kv_memory=1 << 20)
    assert generator._engine.manager.pool.k[0].dtype == mx.int8
    generator.close()


@pytest.mark.parametrize("kv_bits", [5, "5", "8,4", 16, True])
def test_other_bits_are_refused(kv_bits):
    with pytest.raises(ValueError, match=r"\[Engine\] kv_bits is .*: expected 8, 6 or 4"):
        Engine(tiny_model("llama"), kv_bits=kv_bits)


def test_layers_that_cannot_be_quantized():
    with pytest.raises(ValueError, match="kv_bits is 8, but a layer stores latents"):
        Engine(tiny_model("deepseek_v3"), kv_bits=8)
    for kv_bits, dims in product((6, 4), ((12, 16), (16, 12))):
        with pytest.raises(
            ValueError, match=f"is {kv_bits}, but .* have 12 dimensions, no multiple of 8"
        ):
            KVBlockManager(1, 2, dims[0], 16, 4, v_head_dim=dims[1], kv_bits=kv_bits)
    KVBlockManager(1, 2, 12, 16, 4, v_head_dim=7, kv_bits=8)


class TestFlags:
    def options(self, *given):
        return server_flags.engine_options(server_flags.parse([*given]))

    def test_kv_bits(self):
        assert self.options()["kv_bits"] is None
        assert self.options("--kv-bits", "4")["kv_bits"] == 4
        assert self.options("--kv-bits", "8")["kv_bits"] == 8

    @pytest.mark.parametrize(
        ("flag", "default", "other"),
        [("--kv-group-size", "64", "32"), ("--quantized-kv-start", "5000", "0")],
    )
    def test_mlx_lms_other_flags_have_one_value(self, capsys, flag, default, other):
        assert self.options(flag, default) == self.options()
        with pytest.raises(SystemExit):
            self.options(flag, other)
        assert f"argument {flag}: expected {default}, got '{other}'" in capsys.readouterr().err
