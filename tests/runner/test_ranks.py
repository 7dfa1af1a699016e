"""Several processes with one model: the same tokens, refusals by name, an end instead of a hang."""

import json
import signal
import threading
from dataclasses import asdict
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_paged import Engine
from mlx_paged.engine import service
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import ONE_GROUP, LayerGroup
from mlx_paged.options import PoolConfig
from mlx_paged.request import Request
from mlx_paged.runner.batch import Batch, BatchTables
from mlx_paged.runner.model_runner import LaunchedStep
from mlx_paged.runner.plan import (
    VERSION,
    DigestMismatch,
    MirroredAllocator,
    PlanReader,
    PlanWriter,
)
from mlx_paged.runner.processes import join
from mlx_paged.runner.ranks import (
    Ranks,
    _shared,
    first_frame,
    joined,
    read_first_frame,
    why_whole,
)
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span, Step, StepReport
from tests.support.engine import rank_runs
from tests.support.engine.rank_runs import ended, model_of, two_ranks
from tests.support.models import architectures
from tests.support.models.tiny_models import solo_greedy, tiny_model

SCRIPT = "-m", rank_runs.__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("llama", ["preempted", "compiled", "few", "drafted", "profiled", "quantized"], 2),
        ("gpt_oss", ["plain"], 2),  # K/V in fewer bits rounds what ranks add up in another order
        ("qwen3_5", ["plain", "few"], 2),
        ("deepseek_v3", ["ngram"], 1),
    ],
)
def test_two_ranks_give_the_tokens_of_one(name, options, share):
    """Of latents (MLA) every rank has all."""
    processes = two_ranks([*SCRIPT, name, *options])
    model = model_of(name)
    expected = {each: rank_runs.RUNS[each](model) for each in options}
    (output, errors, status), other = ended(processes)
    assert status == other[2] == 0, errors + other[1]
    for each, found in json.loads(output).items():
        ranks, alone = found.pop("ranks"), expected[each].pop("ranks")
        assert alone is None and ranks["count"] == 2 and ranks["plans"] > 0
        assert found["kv_pool_bytes"] * share == expected[each].pop("kv_pool_bytes")
        assert ranks["kv_pool_bytes"] == [found.pop("kv_pool_bytes")] * 2
        if each == "few":
            assert rank_runs.differences(expected[each], found) == []
            assert found["forks"] and found["aborts"] and found["cached"]
            del expected[each]["margins"], found["margins"]
        assert found == expected[each]
        assert found["leaks"] == 0
        assert found.get("drafts") or each not in ("ngram", "drafted")
        assert found["preemptions"] > 0 or each not in ("preempted", "few")


def streaming_ranks():
    """Two ranks that have printed the first part of something long."""
    processes = two_ranks([*SCRIPT, "llama", "long"])
    assert processes[0].stdout is not None and processes[0].stdout.read(1)
    return processes


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ends"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "sent")])
def test_a_rank_that_dies_or_stops_ends_the_run_with_one_error(number, ends):
    first, second = streaming_ranks()
    second.send_signal(number)
    ((_, errors, status),) = ended([first])
    second.kill()
    ended([second])
    assert status == 1
    assert errors.count("mlx_paged: error:") == 1 and f"rank 1 has {ends}" in errors


FAILING = """
import sys
from tests.support.engine import rank_runs
from mlx_paged.runner import ranks
from mlx_paged.runner.model_runner import ModelRunner
forward, calls = ModelRunner._forward, []
def failing(self, batch):
    calls.append(batch)
    if len(calls) == 40 and ranks.rank() == int(sys.argv[1]):
        raise ValueError("planted")
    return forward(self, batch)
ModelRunner._forward = failing
rank_runs.main("llama", "long")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_ends_all_ranks_with_one_error(rank):
    first, second = ended(two_ranks(["-c", FAILING, str(rank)]))
    reason = ("a step failed (ValueError: planted)", "rank 1 failed: planted")[rank]
    assert f"mlx_paged: error: {reason}: every request ends" in first[1]
    assert (first[1] + second[1]).count("mlx_paged: error:") == 1
    assert "Traceback" not in first[1]
    assert first[2] == second[2] == 1


ANOTHER_VERSION = """
from tests.support.engine import rank_runs
from mlx_paged.runner import ranks
ranks.VERSION += ranks.rank()
rank_runs.main("llama", "few")
"""


@pytest.mark.slow
def test_a_rank_of_another_version_ends_the_run_with_one_error():
    first, second = ended(two_ranks(["-c", ANOTHER_VERSION]))
    reason = f"rank 1 failed: rank 0 sends frames of version {VERSION}, this rank reads version"
    assert f"mlx_paged: error: {reason} {VERSION + 1}: expected the same version" in first[1]
    assert first[2] == second[2] == 1


GARBAGE = """
import sys, time
import mlx.core as mx
from mlx_paged import Engine
from mlx_paged.runner import ranks
from mlx_paged.runner.model_runner import ModelRunner
from tests.support.engine.metal_queue import MESSAGE
from tests.support.engine.rank_runs import model_of
launch, calls = ModelRunner.launch, []
def end():
    time.sleep(1)  # before the handlers run
    raise RuntimeError(MESSAGE)
def failing(self, step, before):
    calls.append(step)
    fails = len(calls) == 20 and ranks.rank() == int(sys.argv[1])
    if fails:
        self.pool.replace_handles([mx.full(h.shape, 3.0, h.dtype) for h in self.pool.handles()])
    launched = launch(self, step, before)
    if fails:
        launched.end = end
    return launched
ModelRunner.launch = failing
engine = Engine(ranks.joined(model_of("llama")), num_blocks=64, lookahead=sys.argv[2] == "True")
for output in engine.stream([1, 2, 3], max_tokens=100):
    print(output.token, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "lookahead"), [(0, True), (1, True), (1, False)])
def test_no_token_of_a_step_that_fails_on_any_rank_leaves_rank_0(rank, lookahead):
    first, second = ended(two_ranks(["-c", GARBAGE, str(rank), str(lookahead)]))
    tokens = [int(line) for line in first[0].split()]
    assert tokens == solo_greedy(model_of("llama"), [1, 2, 3], 19), first[1] + second[1]
    assert "mlx_paged: error:" in first[1] and "planted" in first[1]
    assert first[2] == second[2] == 1


def test_few_tokens_are_summed_as_so_many_numbers_as_there_are_ranks(monkeypatch):
    """A ring that loses a rank writes nothing into a smaller sum."""
    sizes = []
    monkeypatch.setattr(mx.distributed, "all_sum", lambda a, group: (sizes.append(a.size), a)[1])
    group = SimpleNamespace(size=lambda: 4)
    for rows in (1, 4, 6):
        requests = [Request(i, [], SamplingParams(), 0) for i in range(rows)]
        before = LaunchedStep(StepReport(Step()), requests, None)
        found = _shared(before, mx.arange(rows), group).sampled
        assert found.tokens.tolist() == list(range(rows))
    assert sizes == [4, 4, 6]


def test_a_closed_service_hears_nothing_of_the_ranks():
    engine = Engine(tiny_model("llama"), num_blocks=8)
    with service.EngineService(engine) as running:
        assert engine._processes.listeners == [running._fail]
    assert engine._processes.listeners == []


@pytest.mark.slow
def test_when_rank_0_dies_the_others_end():
    first, second = streaming_ranks()
    first.kill()
    ended([first])
    assert ended([second])[0][2] == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (6, 3, 2, "expected 1 or 3"),
        (4, 2, 4, "expected 1 or 2"),
        (4, 1, 2, "expected 1"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_with_numbers_that_do(
    heads, kv_heads, ranks, expected
):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 96}
    problem = why_whole(tiny_model("llama", **sizes), ranks)
    assert problem is not None and problem.endswith(expected)
    assert f"num_key_value_heads is {kv_heads}" in problem
    assert why_whole(tiny_model("llama", **sizes), 1) is None


@pytest.mark.parametrize("name, value", [("kv_disk", "d"), ("draft_head", "h")])
def test_what_ranks_cannot_do_is_refused_by_name(name, value):
    model = tiny_model("llama")
    join(model, object.__new__(Ranks))
    with pytest.raises(ValueError, match=rf"{name} is .*: expected None on ranks"):
        Engine(model, num_blocks=8, **{name: value})


def test_models_of_mlx_vlm_are_refused():
    model = type("Model", (nn.Module,), {"__module__": "mlx_vlm.models.qwen2_vl"})()
    assert why_whole(model, 2) == "models of mlx-vlm run in one process only"


def test_models_without_shard_are_refused():
    assert "no shard()" in str(why_whole(tiny_model("gemma2"), 2))


def test_a_latent_and_repeated_heads_need_no_division():
    assert why_whole(tiny_model("deepseek_v3", num_key_value_heads=1), 2) is None
    assert why_whole(architectures.build("qwen3_5"), 4) is not None  # its linear layers' heads


def test_ranks_that_do_not_find_each_other_are_a_mistake_of_the_user(monkeypatch):
    def init():
        raise RuntimeError("[ring] no socket")

    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr(mx.distributed, "init", init)
    with pytest.raises(ValueError, match=r"not find each other: .ring. no"):
        joined(tiny_model("llama"))


@pytest.mark.slow
def test_a_refusal_ends_all_ranks(tmp_path):
    code = (
        "import sys\n"
        "from mlx_paged.runner.ranks import joined\n"
        "from tests.support.models.tiny_models import tiny_model\n"
        "try: joined(tiny_model('gemma2'))\n"
        "except ValueError as error: sys.exit(str(error))\n"
    )
    first, second = ended(two_ranks(["-c", code]))
    assert "model type gemma2: mlx-lm has no shard()" in first[1]
    assert first[2] == 1 and second[2] == 2


def decode_step(allocator, requests):
    planning = Planning()
    for request in requests:
        stop = len(request.tokens)
        planning.copies += allocator.make_writable(request.id, stop - 1, stop)
        planning.add(Span(request, stop - 1, stop, samples=True))
    return planning.step()


def test_a_step_of_32_long_requests_is_a_small_plan():
    allocator = BlockAllocator(32 * 300, 16)
    writer, reader = PlanWriter(allocator), PlanReader(MirroredAllocator(allocator))
    requests = [Request(i, list(range(4096 + i)), SamplingParams(), 0) for i in range(32)]
    for request in requests:
        allocator.admit(request.id, len(request.tokens))
        plan = writer.write(decode_step(allocator, [request]), False)
        assert reader.read(plan)[0].spans[0].request.id == request.id
        assert len(plan) < 2000
    for _ in range(40):
        for request in requests:
            request.tokens.append(1)
        plan = writer.write(decode_step(allocator, requests), False)
        assert len(reader.read(plan)[0].spans) == 32
        assert len(plan) < 2000


class Pair:
    """Rank 0's allocator and another rank's, with the batches that both make of each plan."""

    def __init__(self, groups=ONE_GROUP):
        self.own = BlockAllocator(64, 4, groups, 16)
        self.other = MirroredAllocator(self.own)
        self.writer, self.reader = PlanWriter(self.own), PlanReader(self.other)
        self.tables = [BatchTables.of_groups(each) for each in (self.own, self.other)]

    def launch(self, *spans):
        planning = Planning()
        for request, start, stop in spans:
            planning.copies += self.own.make_writable(request.id, start, stop)
            planning.add(Span(request, start, stop, samples=True))
        step = planning.step()
        found = self.reader.read(self.writer.write(step, False))[0]
        whole = zip((step, found), (self.own, self.other), self.tables, strict=True)
        batches = [Batch(each.spans, of, tables=tables).forwards for each, of, tables in whole]
        for ours, theirs in zip(*batches, strict=True):
            assert ours.slot_mapping.tolist() == theirs.slot_mapping.tolist()
            assert ours.block_tables.tolist() == theirs.block_tables.tolist()

    def admit(self, request_id, length):
        self.own.admit(request_id, length)
        return Request(request_id, list(range(length)), SamplingParams(), 0)

    def drop(self, request):
        self.own.free(request.id)


@pytest.mark.parametrize("guesses", [(), (7,), (7, 8, 9)])
def test_guesses_of_a_span_reach_the_others(guesses):
    allocator = BlockAllocator(16, 4)
    writer, reader = PlanWriter(allocator), PlanReader(MirroredAllocator(allocator))
    request = Request(0, [1, 2, 3, 4, 5], SamplingParams(), 0)
    allocator.admit(0, 5)
    stop = 5 + len(guesses)
    planning = Planning()
    planning.copies += allocator.make_writable(0, 4, stop)
    move = allocator.advance(0, 4, stop, is_sure=False)
    planning.add(Span.of(request, 4, stop, True, move, further=guesses))
    [span] = reader.read(writer.write(planning.step(), False))[0].spans
    assert (span.samples, span.further, span.own_stop) == (1 + len(guesses), guesses, 5)
    assert span.known == [5, *guesses]


def test_entries_of_several_blocks_are_the_same_blocks():
    pair = Pair((LayerGroup(None, 1), LayerGroup(12, 3)))
    request = pair.admit(1, 9)
    pair.launch((request, 0, 9))
    request.tokens.append(1)
    pair.launch((request, 9, 10))


def test_a_request_that_comes_back_in_another_row():
    """Batches of the same requests before and after: each rank keeps tables from step to step."""
    pair = Pair()
    one, two = pair.admit(1, 9), pair.admit(2, 9)
    pair.launch((one, 0, 9), (two, 0, 9))
    one.tokens.append(1)
    two.tokens.append(1)
    pair.launch((one, 9, 10), (two, 9, 10))
    pair.drop(two)
    three = pair.admit(3, 9)
    one.tokens.append(1)
    pair.launch((one, 10, 11), (three, 0, 9))
    pair.own.admit(2, 10)
    one.tokens.append(1)
    pair.launch((one, 11, 12), (two, 0, 10))
    pair.drop(three)
    one.tokens.append(1)
    two.tokens.append(1)
    pair.launch((one, 12, 13), (two, 10, 11))


def test_ranks_that_differ_are_told_both_digests():
    allocator = BlockAllocator(8, 4)
    mirrored = MirroredAllocator(allocator)
    writer, reader = PlanWriter(allocator), PlanReader(mirrored)
    request = Request(5, [1, 2, 3, 4], SamplingParams(), 0)
    allocator.admit(5, 4)
    reader.read(writer.write(decode_step(allocator, [request]), False))
    mirrored.block_tables.put(int(allocator.table_rows([5])[0]), 0, 0, [7])
    request.tokens.append(5)
    plan = writer.write(decode_step(allocator, [request]), False)
    with pytest.raises(DigestMismatch) as found:
        reader.read(plan)
    assert plan[:16].hex() in str(found.value) and reader.digest.hex() in str(found.value)


def test_an_end_that_nobody_can_read_is_an_end(monkeypatch):
    class Ended(Exception):
        pass

    def end(status):
        raise Ended(status)

    class Closed:
        def write(self, text):
            raise BrokenPipeError

    ranks = object.__new__(Ranks)
    ranks.listeners, ranks._ending = [], threading.Lock()
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("sys.stderr", Closed())
    with pytest.raises(Ended, match="1"):
        ranks.end("planted")


@pytest.mark.parametrize("version", [None, VERSION + 1])
def test_frames_of_another_version_are_refused(version):
    """The first version had the configuration alone in its first frame."""
    config = PoolConfig(num_blocks=8)
    assert read_first_frame(first_frame(config)) == config
    content = asdict(config) if version is None else {"version": version, "config": {}}
    message = f"frames of version {version or 1}, this rank reads version {VERSION}: expected"
    with pytest.raises(ValueError, match=message):
        read_first_frame(json.dumps(content).encode())
