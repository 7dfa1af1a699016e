"""Decodes by compiled graphs: the tokens and the pool's bytes of the plain forward."""

import logging

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_paged import Engine, ops
from mlx_paged.attention.forward import path_counts
from mlx_paged.engine.service import EngineService
from mlx_paged.runner import compiled_decode
from mlx_paged.runner.batch import row_bucket
from mlx_paged.runner.buckets import Buckets
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.runner.layer_cache import PagedLayerCache
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.sampling.sampler import Scores
from mlx_paged.server import flags as server_flags
from scripts.compiled_decodes import (
    compare,
    course,
    is_compiled,
    joins_and_leaves,
    num_traces,
    stored,
)
from tests.support.models.architectures import VOCAB, build

SAMPLE = ["llama", "gemma3_text", "gpt_oss", "qwen3_moe", "cohere2", "phi", "deepseek_v3"]
SMALL = {"block_size": 4, "num_blocks": 64, "max_running": 4}


@pytest.fixture(autouse=True)
def no_end_of_time(monkeypatch):
    """A slow machine, too, traces all buckets when an engine is constructed."""
    monkeypatch.setattr(compiled_decode, "MOST_TRACE_SECONDS", float("inf"))


def prompts(count: int, length: int = 5) -> list[list[int]]:
    return np.random.default_rng(1).integers(0, VOCAB, (count, length)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_tokens_logprobs_and_bytes_are_those_of_plain_decodes(name):
    assert compare(build(name)).startswith("same")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_bits", [8, 6, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_quantized_pools_too(name, kv_bits):
    assert compare(build(name), kv_bits=kv_bits).startswith("same")


def test_the_courses_have_preemptions_and_compiled_steps(monkeypatch):
    engine, _ = course(build("llama"), True)
    assert engine.stats.preemptions > 0
    assert engine.stats.cow_clones > 0
    monkeypatch.setattr(CompiledDecode, "__call__", lambda *_: pytest.fail("a compiled step"))
    with pytest.raises(pytest.fail.Exception):
        course(build("llama"), True, lookahead=False)


def test_a_batch_with_padding_is_the_same():
    assert row_bucket(33) == 34
    found = []
    for flag in (True, False):
        engine = Engine(build("llama"), block_size=4, num_blocks=300, max_running=33, compile=flag)
        done = engine.generate(prompts(33), max_tokens=20)
        assert engine.stats.faults == 0
        found.append([(each.tokens, each.logprobs) for each in done])
    assert found[0] == found[1]


def test_padding_is_a_sixteenth_at_most():
    padding = [row_bucket(rows) - rows for rows in range(1, 300)]
    assert min(padding) == 0 == max(padding[:32])
    assert all(16 * more <= rows for rows, more in enumerate(padding, start=1))
    buckets = Buckets.of_device(16)
    assert [buckets.width(count) for count in (1, 32, 33, 128, 129)] == [32, 32, 128, 128, 512]
    assert buckets.widths(129) == [32, 128, 512]


@pytest.mark.slow
def test_requests_join_and_leave_without_a_trace():
    before, after = joins_and_leaves(150)
    assert before == after > 0


def test_a_compiled_step_runs_no_code_of_the_model():
    engine = Engine(build("llama"), **SMALL, compile=True)
    engine.add_request(prompts(1)[0], max_tokens=20)
    engine.step()
    path_counts.clear()
    for _ in range(10):
        engine.step()
    assert not path_counts


def test_new_parameters_need_no_trace_and_new_layers_do():
    models = [build("llama") for _ in range(2)]
    engines = [
        Engine(model, **SMALL, prefix_cache=False, compile=flag)
        for model, flag in zip(models, (True, False), strict=True)
    ]
    before = num_traces(engines[0])

    def tokens() -> list[list[list[int]]]:
        return [[d.tokens for d in e.generate(prompts(3), max_tokens=12)] for e in engines]

    first = tokens()
    for model in models:
        model.update(tree_map(lambda weight: weight * 1.5, model.parameters()))
        mx.eval(model.parameters())
    second = tokens()
    assert num_traces(engines[0]) == before
    for model in models:
        mx.random.seed(0)
        linear_to_lora_layers(model, 1, {"rank": 2, "scale": 20.0, "dropout": 0.0})
        adapters = {
            k: mx.random.normal(v.shape) for k, v in tree_flatten(model.trainable_parameters())
        }
        model.load_weights([(k, v) for k, v in adapters.items() if "lora" in k], strict=False)
        mx.eval(model.parameters())
    third = tokens()
    assert num_traces(engines[0]) > before
    for plain, compiled in (first, second, third):
        assert plain == compiled
    assert first[0] != second[0] != third[0]


def test_changed_scales_of_lora_layers_are_traced_again():
    models = [build("llama") for _ in range(2)]
    for model in models:
        mx.random.seed(0)
        linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})
        factors = [(k, v) for k, v in tree_flatten(model.parameters()) if "lora_" in k]
        model.load_weights([(k, mx.random.normal(v.shape)) for k, v in factors], strict=False)
        mx.eval(model.parameters())
    engine, plain = [
        Engine(model, **SMALL, prefix_cache=False, compile=flag)
        for model, flag in zip(models, (True, False), strict=True)
    ]

    def tokens(of: Engine) -> list[list[int]]:
        return [done.tokens for done in of.generate(prompts(3), max_tokens=12)]

    found = []
    for scale in (1.0, -1.0, -2.0, 1.0):
        layers = [m for model in models for _, m in model.named_modules() if "lora_a" in m]
        assert len(layers) > 8
        for layer in layers:
            layer.scale = scale
        found.append(tokens(engine))
        assert found[-1] == tokens(plain), scale
        traces = num_traces(engine)
        tokens(engine)
        assert num_traces(engine) == traces > 0
    assert found[0] == found[3] != found[1] != found[2] != found[0]


def test_parameters_are_given_in_the_order_of_the_tree():
    model = build("llama")
    found, keys = ops.arrays_in(model.state)
    expected = [leaf for _, leaf in tree_flatten(model.state) if isinstance(leaf, mx.array)]
    assert len(found) == len(expected) > 20
    assert all(a is b for a, b in zip(found, expected, strict=True))
    assert ops.arrays_in(model.state)[1] == keys
    layer = model.model.layers[1].self_attn
    layer["renamed"] = layer.pop("o_proj")
    assert ops.arrays_in(model.state)[1] != keys
    trees = ({"a": (x := mx.ones(1), [x])}, {"a": ((x, x), [])}, {"b": (x, [x])})
    numbers = {ops.arrays_in(tree)[1] for tree in trees}
    assert len(numbers) == len(trees) and ops.arrays_in((x, [], {}, None, 3))[0] == [x]


def test_trees_of_other_forms_have_other_numbers():
    x = mx.ones(1)
    trees = [
        {"a": {"b": x}, "c": x},
        {"a": {"b": x, "c": x}},
        {"a": {}, "b": x},
        {"a": x, "b": {}},
        *[{"a": x, "b": leaf} for leaf in (1, 2, 3, -1, -2, 1.5, -1.0, -2.0, "u", "v")],
    ]
    assert len({ops.arrays_in(tree)[1] for tree in trees}) == len(trees)


class Gained(nn.Module):
    """A layer whose output is multiplied by a number in a dict."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.numbers = layer, {"gain": 1.0}

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x) * self.numbers["gain"]


class Negated(nn.Linear):
    """A layer with the parameters of `nn.Linear`."""

    def __call__(self, x: mx.array) -> mx.array:
        return -super().__call__(x)


def negate(model: nn.Module) -> None:
    for layer in model.model.layers:
        old = layer.mlp.layer.down_proj
        new = Negated(*reversed(old.weight.shape), bias="bias" in old)
        layer.mlp.layer.down_proj = new.update(old.parameters())


def gain(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.numbers = {"gain": -4.0}


@pytest.mark.parametrize("change", [gain, negate])
def test_other_numbers_and_classes_are_traced_again(change):
    found = []
    for flag in (True, False):
        model = build("llama")
        for layer in model.model.layers:
            layer.mlp = Gained(layer.mlp)
        engine = Engine(model, **SMALL, prefix_cache=False, compile=flag)
        before = [done.tokens for done in engine.generate(prompts(3), max_tokens=12)]
        assert is_compiled(engine) == flag
        change(model)
        found.append([done.tokens for done in engine.generate(prompts(3), max_tokens=12)])
        assert found[-1] != before
    assert found[0] == found[1]


def test_quantized_layers_are_traced_again():
    engines = []
    for flag in (True, False):
        engine = Engine(build("llama"), **SMALL, prefix_cache=False, compile=flag)
        before, first = num_traces(engine), engine.generate(prompts(3), max_tokens=9)
        nn.quantize(engine.runner.model.model.layers[0].self_attn, group_size=32, bits=4)
        mx.eval(engine.runner.model.parameters())
        second = engine.generate(prompts(3), max_tokens=9)
        assert (num_traces(engine) > before) == flag
        assert [done.tokens for done in first] != [done.tokens for done in second]
        engines.append([(done.tokens, done.logprobs) for done in second])
    assert engines[0] == engines[1]


def test_a_model_that_looks_at_values_stays_plain_and_whole(caplog):
    model = build("dbrx")
    before = dict(tree_flatten(model.parameters()))
    with caplog.at_level(logging.WARNING):
        engine = Engine(model, **SMALL, compile=True)
    assert not is_compiled(engine)
    assert engine.runner.why_plain == "MLX cannot trace a step"
    assert not caplog.records
    after = dict(tree_flatten(model.parameters()))
    assert all(after[name] is array for name, array in before.items())
    assert engine.generate(prompts(1), max_tokens=4)[0].error is None


def test_no_graph_where_mlx_compiles_nothing():
    mx.disable_compile()
    try:
        assert not is_compiled(Engine(build("llama"), **SMALL, compile=True))
    finally:
        mx.enable_compile()


@pytest.mark.parametrize("options", [{"compile": False}, {"compile": True, "profile": True}])
def test_not_compiled_with_these_options(options):
    assert not is_compiled(Engine(build("llama"), **SMALL, **options))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v32", "gathered K/V has a length"),
        ("afm7", "each sequence has its own forward"),
        ("gear, soft-capped scores", "gathered K/V has a length"),
    ],
)
def test_models_that_stay_plain_say_why(name, reason):
    engine = Engine(build(name), **SMALL, compile=True)
    assert not is_compiled(engine)
    assert engine.runner.why_plain == reason


def failing_trace(monkeypatch, num_rows: int) -> None:
    """Let every trace of a decode of so many rows fail half-way."""

    def update(self, keys, values):
        if self.layer == 1 and len(keys) == num_rows and not compiled_decode.ops.has_values(keys):
            raise ValueError("[test] a layer that cannot be traced")
        return original(self, keys, values)

    original = PagedLayerCache.update_and_fetch
    monkeypatch.setattr(PagedLayerCache, "update_and_fetch", update)


@pytest.mark.slow
@pytest.mark.parametrize("prewarm", [True, False])
def test_a_bucket_that_cannot_be_traced_is_computed_plainly(monkeypatch, caplog, prewarm):
    expected, done = course(build("llama"), False)
    failing_trace(monkeypatch, 3)
    with caplog.at_level(logging.WARNING):
        engine, found = course(build("llama"), True, prewarm=prewarm)
    assert is_compiled(engine)
    assert found == done
    assert stored(engine) == stored(expected)
    assert engine.stats.faults == 0
    assert [record.message for record in caplog.records] == ["MLX cannot trace a decode of 3 rows"]
    assert mx.array_equal(engine.runner.model.lm_head.weight, build("llama").lm_head.weight)


def test_an_error_of_the_plain_step_is_the_requests_error(monkeypatch):
    engine = Engine(build("llama"), **SMALL, compile=True)
    engine.add_request(prompts(1)[0], max_tokens=20)
    engine.step()

    def fail(*_):
        raise ValueError("[test] no forward at all")

    compiled = engine.runner.compiled
    monkeypatch.setattr(compiled, "_computed", fail)
    monkeypatch.setattr(compiled, "_compute", fail)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert str(outputs[-1].completion.error) == "ValueError: [test] no forward at all"


def test_tokens_are_chosen_in_the_graph(monkeypatch):
    """Of rows without options; others choose from what the graph has computed of its logits."""
    engine = Engine(build("llama"), **SMALL, compile=True)
    engine.add_request(prompts(1)[0], max_tokens=12)
    engine.step()
    monkeypatch.setattr(Scores, "of", lambda *_: pytest.fail("scores outside the graph"))
    for _ in range(5):
        engine.step()
    engine.add_request(prompts(2)[1], max_tokens=12, logit_bias={3: 100.0})
    with pytest.raises(pytest.fail.Exception):
        for _ in range(5):
            engine.step()


OPTIONS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    {"logit_bias": {5: 2.5, 9: -100.0}},
    {"repetition_penalty": 1.3},
    {"logprobs": 5},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chosen", [[0, 0, 0], [0, 1, 1], [1, 2, 2], [0, 5, 3, 1], [4, 0, 2]])
def test_options_change_nothing_but_their_rows(chosen):
    found = []
    for flag in (True, False):
        engine = Engine(build("llama"), **SMALL, compile=flag)
        ids = [
            engine.add_request(prompt, max_tokens=15, **OPTIONS[option])
            for prompt, option in zip(prompts(len(chosen)), chosen, strict=True)
        ]
        done = {}
        while engine.has_work:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        found.append([(done[i].tokens, done[i].logprobs, done[i].top_logprobs) for i in ids])
    assert found[0] == found[1]


@pytest.mark.parametrize("is_faster", [True, False])
def test_compiled_if_faster(monkeypatch, is_faster):
    def one_token(self, run, tokens, block):
        _, bits = original(self, run, tokens, block)
        return (1.0 if (run == self._run) == is_faster else 2.0), bits

    original = CompiledDecode._one_token
    monkeypatch.setattr(CompiledDecode, "_one_token", one_token)
    engine = Engine(build("llama"), **SMALL, compile=False)
    compile_decodes = ModelRunner.compile_decodes.__wrapped__
    traces = compile_decodes(engine.runner, None, 4)
    assert (traces is not None) == is_compiled(engine) == is_faster
    assert compile_decodes(engine.runner, True, 4) is not None
    assert compile_decodes(engine.runner, False, 4) is None


def test_costly_buckets_are_traced_when_they_are_used_for_the_third_time(monkeypatch):
    monkeypatch.setattr(compiled_decode, "MOST_TRACE_SECONDS", 0.0)
    engine = Engine(build("llama"), **SMALL, compile=True, prewarm=True)
    assert num_traces(engine) == 2  # that of the comparison, and one at the start
    engine.generate(prompts(1), max_tokens=8)
    assert num_traces(engine) == 2  # one row was traced at the start
    for count in (2, 3):
        engine.add_request(prompts(count)[-1], max_tokens=12)
    seen = []
    while engine.has_work:
        engine.step()
        seen.append(num_traces(engine))
    assert seen[0] == seen[1] == 2 and seen[-1] == 3
    plain = Engine(build("llama"), **SMALL, compile=False)
    given = [prompts(2)[-1], prompts(3)[-1]]
    assert [c.tokens for c in engine.generate(given, max_tokens=12)] == [
        c.tokens for c in plain.generate(given, max_tokens=12)
    ]


def test_a_dropped_write_is_noticed(monkeypatch):
    def store_nothing(self, keys, values):
        if not self.forward.is_traced or self.forward.slot_mapping.shape[0] != 1:
            return update(self, keys, values)
        if not compiled_decode.ops.has_values(keys):  # in the trace only
            return self.keys_and_values()
        return update(self, keys, values)

    update = PagedLayerCache.update_and_fetch
    monkeypatch.setattr(PagedLayerCache, "update_and_fetch", store_nothing)
    assert not is_compiled(Engine(build("llama"), **SMALL, compile=True))


def test_a_write_that_one_bucket_drops_is_noticed(monkeypatch):
    def store_nothing(self, keys, values):
        is_traced = not compiled_decode.ops.has_values(keys)
        if self.layer == 1 and len(keys) == 3 and is_traced:
            return self.keys_and_values()
        return update(self, keys, values)

    update = PagedLayerCache.update_and_fetch
    monkeypatch.setattr(PagedLayerCache, "update_and_fetch", store_nothing)
    assert compare(build("llama")).startswith("DIFFERENT [False, False")


@pytest.mark.slow
def test_the_pool_has_the_same_bytes_after_a_thousand_steps():
    pools = []
    for flag in (True, False):
        engine = Engine(build("llama"), block_size=4, num_blocks=200, max_running=2, compile=flag)
        while engine.stats.steps < 1000:
            if engine.stats.steps % 97 == 0:
                engine.add_request(prompts(1, 3 + engine.stats.steps % 5)[0], max_tokens=120)
            engine.step()
        pools.append(stored(engine))
    assert pools[0] == pools[1]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_no_step_copies_the_pool(name):
    engine = Engine(build(name), block_size=16, num_blocks=20_000, max_running=4, compile=True)
    for prompt in prompts(4):
        engine.add_request(prompt, max_tokens=60)
    for _ in range(5):
        engine.step()
    pool = engine.manager.pool
    largest = max(handle.nbytes for handle in pool.handles())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(40):
        engine.step()
    assert mx.get_peak_memory() - before < largest / 2
    assert largest > 1 << 20


def test_another_thread_traces_again():
    engine = Engine(build("llama"), **SMALL, compile=True)
    made = num_traces(engine)
    expected = Engine(build("llama"), **SMALL, compile=False).generate(prompts(2), max_tokens=9)
    with EngineService(engine) as service:
        tickets = [service.submit(prompt, max_tokens=9) for prompt in prompts(2)]
        found = [ticket.result() for ticket in tickets]
    assert [done.tokens for done in found] == [done.tokens for done in expected]
    assert num_traces(engine) == 2 * made


def test_an_engine_that_waits_for_its_service_traces_once():
    engine = Engine(build("llama"), **SMALL, compile=True, prewarm=None)
    assert num_traces(engine) == 1  # the one that shows that it is right
    with EngineService(engine) as service:
        service.submit(prompts(1)[0], max_tokens=2).result()
    assert num_traces(engine) == 1 + 8


def test_an_engine_without_prewarm_traces_what_it_needs():
    engine = Engine(build("llama"), **SMALL, compile=True, prewarm=False)
    with EngineService(engine) as service:
        service.submit(prompts(1)[0], max_tokens=2).result()
    assert num_traces(engine) == 2


def test_another_stream_traces_again():
    engine = Engine(build("llama"), **SMALL, compile=True)
    made = num_traces(engine)
    with mx.stream(mx.new_stream(mx.default_device())):
        engine.generate(prompts(1), max_tokens=4)
    assert num_traces(engine) == made + 1


def test_metrics_say_what_traces_cost():
    traces = Engine(build("llama"), **SMALL, compile=True).metrics()["traces"]
    assert traces["count"] == 8  # 4 numbers of rows, 2 of columns
    assert traces["seconds"] > 0
    assert traces["bytes"] >= 0
    assert Engine(build("llama"), **SMALL, compile=False).metrics()["traces"] is None


@pytest.mark.parametrize(
    ("flags", "expected"), [([], None), (["--no-compile"], False), (["--compile"], True)]
)
def test_a_flag_switches_it_off(flags, expected):
    assert server_flags.engine_options(server_flags.parse(flags))["compile"] is expected
