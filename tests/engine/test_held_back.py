"""A step with a chunk is held back until the tokens of the step before have been returned."""

import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_paged import Engine, EngineService, FinishReason, ops
from mlx_paged.runner import model_runner
from mlx_paged.runner.model_runner import ModelRunner
from tests.engine.test_prompt_logprobs import assert_scores
from tests.support import TIMEOUT
from tests.support.engine.begun import has_begun
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

SHORT, LONG, OTHER = (
    [(seed * 37 + 11 * i * i) % VOCAB for i in range(n)] for seed, n in ((1, 9), (2, 60), (3, 41))
)
CHUNK, TOKENS = 16, 14


def make_engine(model, **options):
    options = {
        "block_size": 4,
        "num_blocks": 96,
        "prefill_chunk": CHUNK,
        "max_running": 3,
    } | options
    return Engine(model, **options)


def under_way(engine):
    return engine._pipeline._under_way


def is_held(engine):
    """Whether most of the step under way has not begun."""
    held = under_way(engine)
    return held is not None and not all(map(has_begun, held.launched.pending))


def hold(engine, max_tokens=TOKENS):
    """Step until a step is held back that decodes SHORT beside a chunk of LONG; the ids of both,
    and what came out."""
    ids = engine.add_request(SHORT, max_tokens=max_tokens, keep=True), None
    tokens = [o.token for _ in range(4) for o in engine.step()]
    assert not is_held(engine)
    ids = ids[0], engine.add_request(LONG, max_tokens=TOKENS)
    tokens += [output.token for output in engine.step()]
    assert is_held(engine)
    assert {span.request.id for span in under_way(engine).step.spans} == {*ids}
    return *ids, tokens


def finish(engine):
    """The completions of everything that is left."""
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.manager.check_integrity()
        assert engine.stats.faults < 9
    return done


def expected(model, *prompts):
    return [solo_greedy(model, prompt, TOKENS) for prompt in prompts]


def assert_idle(engine):
    engine._settle()
    engine.release(0)
    assert engine.manager.blocks_in_use == 0


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "jamba", "lfm2", "mamba2"])
def test_tokens_are_returned_before_most_of_a_chunk_begins(kind):
    """Decodes are launched ahead as a whole, so that a device always has work."""
    model = tiny_model(kind)
    engine = make_engine(model)
    ids, held, whole = [engine.add_request(SHORT, max_tokens=30)], 0, 0
    for _ in range(5):
        engine.step()
    ids += [engine.add_request(prompt, max_tokens=TOKENS) for prompt in (LONG, OTHER)]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        if (ahead := under_way(engine)) is not None:
            has_chunk = ahead.step.work.chunk_tokens > 0
            assert is_held(engine) == has_chunk
            held, whole = held + has_chunk, whole + (not has_chunk)
    assert held >= 5 and whole >= 5
    assert done[ids[0]].tokens == solo_greedy(model, SHORT, 30)
    assert [done[i].tokens for i in ids[1:]] == expected(model, LONG, OTHER)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "mamba2"])
def test_a_step_that_is_held_back_begins_with_its_first_layers(kind, monkeypatch):
    """Otherwise a device would wait while tokens are returned."""
    began, begin = [], ModelRunner._begin

    def watched(runner, arrays):
        began.append((runner._held_back, arrays))
        begin(runner, arrays)

    monkeypatch.setattr(ModelRunner, "_begin", watched)
    engine = make_engine(tiny_model(kind))
    hold(engine)
    held, arrays = began[-1]
    assert held is under_way(engine).launched
    assert arrays and all(map(has_begun, arrays))
    assert sum(map(has_begun, held.pending)) <= 6


def test_a_first_token_does_not_wait_for_the_next_prompt(model):
    engine = make_engine(model, prefill_chunk=len(LONG))
    first, second = (engine.add_request(prompt, max_tokens=3) for prompt in (LONG, OTHER))
    (output,) = engine.step()
    assert output.request_id == first and is_held(engine)
    assert finish(engine).keys() == {first, second}


def test_a_last_token_does_not_wait_for_the_next_prompt(model):
    engine = make_engine(model, max_running=1)
    engine.add_request(SHORT, max_tokens=5)
    engine.add_request(LONG, max_tokens=5)
    outputs = []
    while not any(output.completion for output in outputs):
        outputs = engine.step()
    assert is_held(engine) and under_way(engine).step.work.decode_rows == 0
    finish(engine)


def test_prompt_scores_do_not_begin_a_step_that_is_held_back(model):
    engine = make_engine(model)
    engine.add_request(SHORT, max_tokens=20)
    for _ in range(3):
        engine.step()
    scored = engine.add_request(LONG, max_tokens=4, prompt_logprobs=2)
    engine.step()
    assert is_held(engine)
    assert sum(map(has_begun, under_way(engine).launched.pending)) <= 4  # K/V of two layers
    done = finish(engine)
    assert_scores(model, LONG, done[scored])


def abort_decode(engine, short, long):
    assert engine.abort(short).tokens == solo_greedy(engine.manager.runner.model, SHORT, 5)
    return {short}


def abort_prompt(engine, short, long):
    assert engine.abort(long).finish_reason is FinishReason.ABORT
    return {long}


def abort_both(engine, short, long):
    return abort_decode(engine, short, long) | abort_prompt(engine, short, long)


def fork_decode(engine, short, long):
    engine.fork(short, max_tokens=TOKENS - 6)
    return set()


def fork_prompt(engine, short, long):
    engine.fork(long, [5, 6], max_tokens=3)
    return set()


def abort_and_use_the_blocks(engine, short, long):
    """The next step writes into the blocks that the step under way still writes."""
    gone = abort_both(engine, short, long)
    engine.release(short)
    engine.add_request(LONG[::-1], max_tokens=4)
    return gone


def forget_prefixes(engine, short, long):
    engine.reset_prefix_cache()
    return set()


CHANGES = (abort_decode, abort_prompt, abort_both, fork_decode, fork_prompt, forget_prefixes)


@pytest.mark.parametrize("change", [*CHANGES, abort_and_use_the_blocks])
@pytest.mark.parametrize("kind", ["llama", "jamba"])
def test_requests_of_a_step_that_is_held_back_may_change(kind, change):
    model = tiny_model(kind)
    engine = make_engine(model, num_blocks=40)
    short, long, tokens = hold(engine)
    gone = change(engine, short, long)
    other = engine.add_request(OTHER, max_tokens=TOKENS)
    done = finish(engine)
    prompts = {short: SHORT, long: LONG, other: OTHER}
    for request_id in prompts.keys() - gone:
        assert done[request_id].tokens == solo_greedy(model, prompts[request_id], TOKENS)
    for completion in done.values():  # forks, too: each goes on as mlx-lm does
        assert completion.finish_reason is FinishReason.LENGTH
    assert tokens == solo_greedy(model, SHORT, 5)
    assert_idle(engine)


def test_a_fork_of_a_step_that_is_held_back_continues_its_parent(model):
    engine = make_engine(model)
    short, long, _ = hold(engine)
    child = engine.fork(short, max_tokens=TOKENS - 6)
    done = finish(engine)
    assert done[short].tokens == solo_greedy(model, SHORT, TOKENS)
    assert done[child].tokens == done[short].tokens[6:]
    assert done[long].tokens == solo_greedy(model, LONG, TOKENS)


def test_a_request_of_a_step_that_is_held_back_may_be_preempted(model):
    engine = make_engine(model, num_blocks=45, prefill_chunk=4, max_running=5, prefix_cache=False)
    prompts = [SHORT, SHORT[::-1], OTHER[:9], LONG[:9]]
    ids = [engine.add_request(prompt, max_tokens=40) for prompt in prompts]
    for _ in range(12):
        engine.step()
    ids.append(engine.add_request(LONG, max_tokens=TOKENS))
    done, was_held = {}, False
    while engine.has_work:
        before, held = engine.scheduler.num_preemptions, is_held(engine)
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        was_held |= held and engine.scheduler.num_preemptions > before
    assert was_held
    assert [done[i].tokens for i in ids[:4]] == [solo_greedy(model, p, 40) for p in prompts]
    assert done[ids[4]].tokens == solo_greedy(model, LONG, TOKENS)


@pytest.mark.parametrize("message", ["planted", "[METAL] Command buffer execution failed: planted"])
@pytest.mark.parametrize(("at", "lookahead"), [(0, True), (0, False), (1, True)])
def test_a_failure_of_what_was_held_back_costs_no_token(model, monkeypatch, at, lookahead, message):
    """At 0 the rest of the step fails to begin; at 1 the first layers of the next one."""
    engine = make_engine(model)
    short, long, tokens = hold(engine)
    engine.lookahead = lookahead
    evaluate, calls = mx.async_eval, []

    def failing(*arrays):
        calls.append(arrays)
        if len(calls) == at + 1:
            raise RuntimeError(message)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", failing)
    outputs = engine.step()
    assert engine.stats.faults == 1 and not outputs
    done = finish(engine)
    assert engine.stats.faults == 1
    assert tokens == solo_greedy(model, SHORT, 5)
    assert [done[i].tokens for i in (short, long)] == expected(model, SHORT, LONG)
    assert_idle(engine)


def test_a_failure_while_prompts_are_scored_costs_no_score(model, monkeypatch):
    engine = make_engine(model)
    engine.add_request(SHORT, max_tokens=20)
    for _ in range(3):
        engine.step()
    prompt = OTHER[:12]
    scored = engine.add_request(prompt, max_tokens=1, prompt_logprobs=0)  # ends with this step
    engine.step()
    assert is_held(engine)
    evaluate, calls = mx.eval, []

    def failing(*arrays):
        calls.append(arrays)
        if len(calls) == 1:
            raise RuntimeError("planted")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", failing)
    done = finish(engine)
    assert engine.stats.faults == 1
    assert_scores(model, prompt, done[scored])


def test_ctrl_c_while_a_step_is_held_back(model, monkeypatch):
    """Between two steps and while the rest begins, as in any step."""
    engine = make_engine(model)
    short, long, _ = hold(engine)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert is_held(engine)
    evaluate, calls = mx.async_eval, []

    def interrupted(*arrays):
        calls.append(arrays)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    done = finish(engine)
    assert engine.stats.faults == 0
    assert [done[i].tokens for i in (short, long)] == expected(model, SHORT, LONG)


def test_another_thread_computes_again_what_was_held_back(model):
    engine = make_engine(model)
    short, long, _ = hold(engine)
    with ThreadPoolExecutor(1) as there:
        done = there.submit(finish, engine).result(TIMEOUT)
    assert engine.stats.faults == 1
    assert [done[i].tokens for i in (short, long)] == expected(model, SHORT, LONG)
    assert_idle(engine)


@pytest.mark.parametrize("call", ["abort", "fork"])
def test_another_thread_may_change_what_is_held_back(model, call):
    engine = make_engine(tiny_model("jamba") if call == "abort" else model)
    short, long, _ = hold(engine)
    with ThreadPoolExecutor(1) as there:
        there.submit(getattr(engine, call), short).result(TIMEOUT)
        done = there.submit(finish, engine).result(TIMEOUT)
    assert done[long].tokens == solo_greedy(engine.manager.runner.model, LONG, TOKENS)
    assert (short in done) == (call == "fork")


def test_threads_that_take_turns_lose_few_steps(model):
    """Each lost step computes the whole prompt again, so one after the other would never end."""
    engine = make_engine(model, num_blocks=256, prefill_chunk=4)
    long = [(7 * i + i * i) % VOCAB for i in range(400)]
    request = engine.add_request(long, max_tokens=4)
    done, steps = {}, 0
    with ThreadPoolExecutor(1) as here, ThreadPoolExecutor(1) as there:
        for thread in cycle((here, here, there, there)):
            if not engine.has_work:
                break
            steps += 1
            assert steps < 300, "the prompt is computed again and again"
            for output in thread.submit(engine.step).result(TIMEOUT):
                if output.completion is not None:
                    done[output.request_id] = output.completion.tokens
    assert done[request] == solo_greedy(model, long, 4)
    assert 1 <= engine.stats.faults <= 3


def test_a_service_takes_over_and_hands_over_without_a_loss(model):
    engine = make_engine(model)
    short, *_ = hold(engine, 200)  # more than the service computes
    with EngineService(engine) as service:
        assert engine.stats.faults == 0
        ticket = service.submit(OTHER, max_tokens=TOKENS)
        assert next(iter(ticket)).token == solo_greedy(model, OTHER, 1)[0]
        late = service.call(lambda engine: engine.add_request(LONG[::-1], max_tokens=TOKENS))
    done = finish(engine)
    assert engine.stats.faults == 0
    assert done[short].tokens == solo_greedy(model, SHORT, 200)
    assert done[late].tokens == solo_greedy(model, LONG[::-1], TOKENS)
    assert_idle(engine)


def test_an_engine_is_dropped_with_the_step_that_it_holds_back(model):
    gc.collect()
    before = ops.reserved_bytes()
    engine = make_engine(model)
    hold(engine)
    gc.disable()
    try:
        del engine
        mx.synchronize()
        assert ops.reserved_bytes() == before
    finally:
        gc.enable()


def test_an_abort_that_leaves_a_snapshot_does_not_begin_what_is_held_back():
    """The snapshot has the states that the step computes."""
    model = tiny_model("lfm2")
    engine = make_engine(model, block_size=4)
    prompt = SHORT[:7]
    request = engine.add_request(prompt, max_tokens=30)
    for _ in range(4):
        engine.step()
    engine.add_request(LONG, max_tokens=4)
    engine.step()
    assert is_held(engine)
    tokens = engine.abort(request).tokens
    assert is_held(engine) and len(prompt + tokens) % 4 == 0  # else there is no snapshot
    engine.settle()
    with ThreadPoolExecutor(1) as there:  # the states do not need this thread any more
        turn = [prompt + tokens + [3, 4]]
        (again,) = there.submit(engine.generate, turn, max_tokens=6).result(TIMEOUT)
    assert again.tokens == solo_greedy(model, prompt + tokens + [3, 4], 6)
    assert again.cached_prompt_tokens == len(prompt + tokens)


@pytest.mark.parametrize("kind", ["lfm2", "mamba2"])
def test_the_snapshot_of_an_aborted_prompt_begins_nothing_of_its_chunk(kind):
    """The snapshot has the states at the end of the chunk that is held back."""
    model = tiny_model(kind)
    engine = make_engine(model)
    engine.add_request(SHORT, max_tokens=20)
    for _ in range(4):
        engine.step()
    prompt = LONG[:CHUNK]
    request = engine.add_request(prompt, max_tokens=4)
    engine.step()
    pending = list(under_way(engine).launched.pending)
    begun = list(map(has_begun, pending))
    engine.abort(request)
    assert not all(begun) and list(map(has_begun, pending)) == begun
    *_, left = engine.manager.allocator.states.snapshots.state_ids()
    states = engine.runner.states.arrays([left])
    assert not all(map(has_begun, states))
    engine.settle()
    assert states and all(map(has_begun, states))  # another thread could not begin them
    (again,) = engine.generate([[*prompt, 3]], max_tokens=6)
    assert again.tokens == solo_greedy(model, [*prompt, 3], 6)
    assert again.cached_prompt_tokens == len(prompt)


def test_steps_begin_in_the_order_of_their_launches(model, monkeypatch):
    """A step may write into blocks that the step before it still reads."""
    launches, begins = [], []
    launch, begin_last = ModelRunner.launch, ModelRunner._begin_last

    def launched(runner, step, before):
        launches.append(launch(runner, step, before))
        return launches[-1]

    def began(runner, step):
        begins.append(step)
        begin_last(runner, step)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(ModelRunner, "_begin_last", began)
    engine = make_engine(model)
    hold(engine)
    finish(engine)
    assert list(dict.fromkeys(begins)) == launches


def test_a_service_delivers_a_token_before_the_next_chunk_begins(model, monkeypatch):
    """The reader has the token while the service's thread begins the rest of the chunk."""
    engine = make_engine(model, max_running=1)
    arrived, seen = threading.Event(), []
    let_go = ModelRunner._let_go

    def watched(runner, *args):
        seen.append(arrived.wait(TIMEOUT))
        let_go(runner, *args)

    with EngineService(engine) as service:
        tickets = service.adopt(
            lambda engine: [engine.add_request(p, max_tokens=3) for p in (SHORT, LONG)]
        )
        monkeypatch.setattr(ModelRunner, "_let_go", watched)
        assert tickets[0].result().tokens == solo_greedy(model, SHORT, 3)
        arrived.set()
        assert tickets[1].result().tokens == solo_greedy(model, LONG, 3)
    assert seen and all(seen)


def test_transfers_begin_what_is_held_back(model):
    """They read blocks as the step leaves them, and write blocks that it may still read."""
    engine = make_engine(model)
    short, long, _ = hold(engine)
    engine.runner.transfer([], [])
    assert not is_held(engine)
    done = finish(engine)
    assert [done[i].tokens for i in (short, long)] == expected(model, SHORT, LONG)


def test_the_time_of_a_chunk_is_not_that_of_the_step_after_it(model, monkeypatch):
    """MLX waits for most of a chunk within the launch of the next step."""
    engine = make_engine(model, max_stall_ms=10_000)
    seconds, observed, letting_go = [0.0], [], []
    monkeypatch.setattr(engine._pipeline._pauses, "clock", lambda: seconds[0])
    monkeypatch.setattr(model_runner, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(
        engine.scheduler.budget, "observe", lambda *observation: observed.append(observation)
    )
    let_go, begin_last = ModelRunner._let_go, ModelRunner._begin_last

    def watched(runner, *args):
        letting_go.append(True)
        let_go(runner, *args)
        letting_go.clear()

    def slow(runner, launched):
        seconds[0] += bool(letting_go)
        begin_last(runner, launched)

    monkeypatch.setattr(ModelRunner, "_let_go", watched)
    monkeypatch.setattr(ModelRunner, "_begin_last", slow)
    hold(engine)
    finish(engine)
    times = {work.chunk_tokens > 0: set[float]() for work, _ in observed}
    for work, taken in observed:
        times[work.chunk_tokens > 0].add(taken)
    assert times[False] == {0.0}
    assert 1.0 in times[True] and times[True] <= {0.0, 1.0}  # the first prompt was not held back
