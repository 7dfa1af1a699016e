"""An engine that many threads and tasks use at once: what they read, and what they ask of it."""

import asyncio
import threading

import numpy as np
import pytest

from mlx_paged import Engine, FinishReason, SamplingParams
from mlx_paged.engine.service import EngineService
from tests.support.engine.service_harness import (
    OTHER,
    PROMPT,
    THREAD,
    TIMEOUT,
    Pause,
    assert_aborted,
    background,
    model,
    reference,
    solo,
    tokens_of,
)
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

pytest_plugins = ["tests.support.engine.service_fixtures"]


# Reading


@pytest.mark.slow
def test_many_threads_get_what_mlx_lm_gives_each_prompt_alone(serve):
    rng = np.random.default_rng(0)
    jobs = [
        (rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist(), int(rng.integers(1, 24)))
        for _ in range(64)
    ]
    expected = [reference(num_tokens, prompt) for prompt, num_tokens in jobs]
    service = serve()

    def client(number):
        mine = jobs[number::8]
        tickets = [service.submit(prompt, max_tokens=n) for prompt, n in mine]
        read = [tokens_of(ticket) for ticket in tickets]
        assert read == [ticket.result(TIMEOUT).tokens for ticket in tickets]
        return read

    clients = [background(client, number) for number in range(8)]
    for number, done in enumerate(clients):
        assert done.result(TIMEOUT) == expected[number::8]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
def test_an_engine_moves_to_the_services_thread_and_back(model_type):
    engine = Engine(model(model_type), block_size=4, num_blocks=64)
    expected = [solo(tuple(prompt), 12, model_type) for prompt in (PROMPT, OTHER)]

    def here():
        return [c.tokens for c in engine.generate([PROMPT, OTHER], max_tokens=12)]

    assert here() == expected
    with EngineService(engine) as service:
        tickets = [service.submit(prompt, max_tokens=12) for prompt in (PROMPT, OTHER)]
        assert [ticket.result(TIMEOUT).tokens for ticket in tickets] == expected
    assert here() == expected


def test_arrays_that_a_model_made_lazily_are_computed_by_their_own_thread():
    """Llama 3's rope keeps frequencies that are no parameters."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with EngineService(Engine(tiny_model("llama", rope_scaling=scaling), num_blocks=8)) as service:
        tokens = service.submit(PROMPT, max_tokens=8).result(TIMEOUT).tokens
    assert tokens == solo_greedy(tiny_model("llama", rope_scaling=scaling), PROMPT, 8)


def test_params_reach_the_request(serve):
    ticket = serve().submit(PROMPT, SamplingParams(max_tokens=9, stop_token_ids=reference(9)[3:4]))
    assert ticket.result(TIMEOUT).finish_reason is FinishReason.STOP


def test_the_last_output_carries_the_completion(serve):
    ticket = serve().submit(PROMPT, max_tokens=5)
    outputs = list(ticket)
    assert {output.request_id for output in outputs} == {ticket.request_id}
    assert [output.completion is not None for output in outputs] == [False] * 4 + [True]
    assert outputs[-1].completion is ticket.result(TIMEOUT) and ticket.done


def test_several_threads_may_wait_for_one_ticket(engine, serve):
    pause, service = Pause(engine, after=1), serve()
    ticket = service.submit(PROMPT, max_tokens=2)
    pause.wait()
    waiting, ready = [], threading.Barrier(4)
    for _ in range(3):
        waiting.append(background(lambda: (ready.wait(TIMEOUT), ticket.result(TIMEOUT))[1]))
    ready.wait(TIMEOUT)
    pause.end()
    assert [done.result(TIMEOUT).tokens for done in waiting] == [reference(2)] * 3


def test_a_loop_that_was_left_can_be_taken_up_again(serve):
    ticket = serve().submit(PROMPT, max_tokens=8)
    first = [next(ticket).token, next(ticket).token]
    assert first + tokens_of(ticket) == reference(8) and list(ticket) == []


def test_submissions_that_arrive_together_are_admitted_together(engine, serve):
    events, add, step = [], engine.add_request, engine.step
    engine.add_request = lambda *args, **options: (events.append("add"), add(*args, **options))[1]
    engine.step = lambda: (events.append("step"), step())[1]
    service = serve()
    entered, go_on = threading.Event(), threading.Event()
    held = background(service.call, lambda engine: (entered.set(), go_on.wait(TIMEOUT)))
    assert entered.wait(TIMEOUT)
    clients = [background(lambda: service.submit(PROMPT, max_tokens=3)) for _ in range(6)]
    service._calls.wait(1 + len(clients))
    go_on.set()
    assert held.result(TIMEOUT)[1]
    for client in clients:
        assert client.result(TIMEOUT).result(TIMEOUT).tokens == reference(3)
    assert events[:7] == ["add"] * 6 + ["step"]


def test_an_idle_service_sleeps(engine, serve, monkeypatch):
    reads, has_work = [], Engine.has_work
    monkeypatch.setattr(
        Engine, "has_work", property(lambda self: (reads.append(1), has_work.fget(self))[1])
    )
    service = serve()
    for _ in range(200):
        service.call(lambda engine: None)
    assert len(reads) <= 3 * 202


# Calls


def test_a_call_runs_on_the_engines_thread_and_returns_its_value(engine, serve):
    service = serve()
    assert service.call(lambda e: e is engine)
    name = service.call(lambda e: service.call(lambda e: threading.current_thread().name))
    assert name == THREAD
    service.submit(PROMPT, max_tokens=4).result(TIMEOUT)
    assert service.call(lambda e: e.stats.requests_finished) == 1


def test_a_call_that_raises_harms_its_caller_only(serve):
    service = serve()
    ticket = service.submit(PROMPT, max_tokens=9)
    for error in (KeyError, SystemExit):
        with pytest.raises(error):
            service.call(lambda e, error=error: (_ for _ in ()).throw(error()))
    assert ticket.result(TIMEOUT).tokens == reference(9)


def test_a_request_has_one_ticket(engine, serve):
    pause, service = Pause(engine, after=2), serve()
    (ticket,) = service.adopt(lambda engine: [engine.add_request(PROMPT, max_tokens=9)])
    pause.wait()
    second = background(lambda: service.adopt(lambda engine: [ticket.request_id]))
    service._calls.wait(2)
    pause.end()
    with pytest.raises(ValueError, match="request 0 has a ticket: expected another request"):
        second.result(TIMEOUT)
    assert tokens_of(ticket) == reference(9)


def test_a_request_without_a_ticket_is_computed_unheard(serve):
    service = serve()
    service.call(lambda engine: engine.add_request(OTHER, max_tokens=3))
    assert service.submit(PROMPT, max_tokens=9).result(TIMEOUT).tokens == reference(9)
    assert service.call(lambda engine: engine.stats.requests_finished) == 2


# Asyncio


def run(coroutine):
    async def bounded():
        return await asyncio.wait_for(coroutine, TIMEOUT)

    return asyncio.run(bounded())


@pytest.mark.slow
def test_tasks_read_without_a_thread_each(serve):
    service = serve()
    threads = threading.active_count()
    lengths = range(3, 19)

    async def read(ticket):
        tokens = [output.token async for output in ticket]
        assert threading.active_count() == threads
        assert [output async for output in ticket] == []
        return tokens

    async def client():
        tickets = [service.submit(PROMPT, max_tokens=n) for n in lengths]
        return await asyncio.gather(*map(read, tickets))

    assert run(client()) == [reference(n) for n in lengths]


def test_a_step_wakes_an_event_loop_once(serve, monkeypatch):
    """However many of its tasks wait for a token."""
    steps, service = 8, serve()

    async def read(ticket):
        return [output.token async for output in ticket]

    async def main():
        loop, called = asyncio.get_running_loop(), []
        call_soon = loop.call_soon_threadsafe
        options = {"max_tokens": steps, "ignore_eos": True}
        tickets = service.adopt(
            lambda engine: [engine.add_request([5, 6, 7 + i], **options) for i in range(6)]
        )
        monkeypatch.setattr(
            loop,
            "call_soon_threadsafe",
            lambda function, *args, **how: (
                called.append(threading.current_thread().name),
                call_soon(function, *args, **how),
            ),
        )
        read_tokens = await asyncio.gather(*map(read, tickets))
        return read_tokens, called.count(service._thread.name)

    tokens, called = asyncio.run(main())
    assert [len(each) for each in tokens] == [steps] * 6
    assert called <= steps + 1


def test_cancelling_a_task_aborts_the_request_that_it_waits_for(engine, serve):
    pause, service = Pause(engine, after=2), serve()
    ticket = service.submit(PROMPT, max_tokens=50)

    async def client():
        seen = asyncio.Event()

        async def read():
            await anext(ticket)
            await anext(ticket)
            seen.set()
            await anext(ticket)

        problems = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: problems.append(problem)
        )
        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        service._calls.wait(2)
        pause.end()
        await asyncio.to_thread(ticket.result, TIMEOUT)
        assert problems == [] and ticket._inbox._waiting == []

    run(client())
    assert_aborted(ticket, reference(50)[:2] + tokens_of(ticket))


def test_a_task_learns_that_a_step_raised(engine, serve):
    failure = OSError("device lost")
    pause, service = Pause(engine, after=1, error=failure), serve()
    ticket = service.submit(PROMPT, max_tokens=30)

    async def read():
        await anext(ticket)
        asyncio.get_running_loop().call_soon(pause.end)
        async for _ in ticket:
            pass

    with pytest.raises(OSError, match="device lost"):
        run(read())


def test_tasks_wait_for_completions(engine):
    service = EngineService(engine, max_unread=2)

    async def client():
        async with service as entered:
            assert entered is service and service.is_running
            tickets = [service.submit(p, max_tokens=9) for p in (PROMPT, OTHER)]
            done = await asyncio.gather(*tickets)
            assert await tickets[0] is done[0] is tickets[0].result()
            assert [output.token async for output in tickets[1]] == reference(9, OTHER)
            return [completion.tokens for completion in done]

    assert run(client()) == [reference(9), reference(9, OTHER)]
    assert not service.is_running and not service._thread.is_alive()


def test_cancelling_a_task_that_waits_for_a_completion_aborts_its_request(engine, serve):
    pause, service = Pause(engine, after=1), serve()
    ticket = service.submit(PROMPT, max_tokens=200)
    pause.wait()

    async def client():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket, 0.01)
        pause.end()
        return await ticket

    assert run(client()).finish_reason is FinishReason.ABORT


def test_leaving_a_loop_over_a_ticket_without_a_name_aborts_its_request(engine, serve):
    service = serve()

    async def client():
        async for output in service.submit(PROMPT, max_tokens=200):
            return output.token

    assert run(client()) == reference(1)[0]
    assert service.call(lambda engine: engine.has_work) is False


def test_a_task_that_waits_for_a_completion_learns_that_a_step_raised(engine, serve):
    failure = MemoryError("out of device memory")
    pause, service = Pause(engine, after=1, error=failure), serve()
    ticket = service.submit(PROMPT, max_tokens=9)

    async def client():
        asyncio.get_running_loop().call_soon(pause.end)
        await ticket

    with pytest.raises(MemoryError, match="out of device memory"):
        run(client())


def test_a_loop_that_is_gone_does_not_disturb_the_engine(engine, serve):
    pause, service = Pause(engine, after=1), serve()
    ticket = service.submit(PROMPT, max_tokens=9)
    pause.wait()
    next(ticket)
    loop = asyncio.new_event_loop()
    task = loop.create_task(anext(ticket))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    pause.end()
    assert ticket.result(TIMEOUT).tokens == reference(9)
    assert service.error is None and not task.done()
