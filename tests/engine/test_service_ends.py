"""How requests of a service end, and the service itself: aborts, limits, closing, failures."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from mlx_paged import FinishReason
from mlx_paged.engine.service import EngineService
from tests.support.engine.service_harness import (
    OTHER,
    PROMPT,
    TIMEOUT,
    Pause,
    assert_aborted,
    background,
    reference,
    submitted,
    tokens_of,
)
from tests.support.models.tiny_models import VOCAB

pytest_plugins = ["tests.support.engine.service_fixtures"]


def test_any_thread_may_abort_and_others_do_not_notice(engine, serve):
    pause, service = Pause(engine, after=6), serve()
    kept, doomed = submitted(service, [OTHER, PROMPT], max_tokens=50)
    reader = background(lambda: tokens_of(doomed))
    pause.wait()
    background(doomed.abort).result(TIMEOUT)
    pause.end()
    tokens = reader.result(TIMEOUT)
    assert 1 <= len(tokens) < 12
    assert_aborted(doomed, tokens)
    assert kept.result(TIMEOUT).tokens == reference(50, OTHER)
    doomed.abort()


def test_a_reader_that_is_too_slow_loses_its_request_but_no_token(serve):
    service = serve(max_unread=8)
    ticket = service.submit(PROMPT, max_tokens=50)
    for _ in range(60):  # at least one step each, until the service is idle
        service.call(lambda engine: None)
    assert ticket.done
    tokens = tokens_of(ticket)
    assert len(tokens) == 9
    assert_aborted(ticket, tokens)


def test_as_many_outputs_may_wait_as_were_agreed(serve):
    ticket = (service := serve(max_unread=8)).submit(PROMPT, max_tokens=9)
    service.close(drain=True)
    assert tokens_of(ticket) == reference(9)
    assert ticket.result(TIMEOUT).finish_reason is FinishReason.LENGTH


def test_whoever_waits_for_the_result_need_not_read(engine, serve):
    pause, service = Pause(engine, after=2), serve(max_unread=4)
    ticket = service.submit(PROMPT, max_tokens=40)
    pause.wait()
    with pytest.raises(TimeoutError, match="request 0 has not ended within 0 seconds"):
        ticket.result(0)
    pause.end()
    assert ticket.result(TIMEOUT).tokens == reference(40) == tokens_of(ticket)


@pytest.mark.parametrize("how", ["dropped", "left"])
def test_a_reader_that_goes_away_ends_its_request(engine, serve, how):
    pause, service = Pause(engine, after=2), serve()
    ticket = service.submit(PROMPT, max_tokens=50)
    request_id = next(ticket).request_id
    pause.wait()
    if how == "dropped":
        del ticket
    else:
        with ticket:
            pass
    pause.end()
    assert service.call(lambda engine: engine.abort(request_id)) is None


@pytest.mark.parametrize("drain", [True, False])
def test_close_ends_what_is_open(engine, serve, drain):
    pause, service = Pause(engine, after=2), serve()
    tickets = submitted(service, [PROMPT] * 2, max_tokens=30)
    pause.wait()
    closing = background(service.close, drain)
    service._calls.wait(2)
    pause.end()
    closing.result(TIMEOUT)
    for ticket in tickets:
        completion = ticket.result(0)
        assert completion.finish_reason is (FinishReason.LENGTH if drain else FinishReason.ABORT)
        assert tokens_of(ticket) == completion.tokens == reference(30)[: len(completion.tokens)]
        assert len(completion.tokens) == 30 if drain else len(completion.tokens) < 10


def test_several_threads_may_close_at_once_and_the_hastiest_wins(engine, serve):
    pause, service = Pause(engine, after=2), serve()
    ticket = service.submit(PROMPT, max_tokens=50)
    pause.wait()
    closing = [background(service.close, drain) for drain in (True, False, True)]
    service._calls.wait(4)
    pause.end()
    for done in closing:
        done.result(TIMEOUT)
    assert_aborted(ticket, tokens_of(ticket))


def test_a_call_may_close_the_service(serve):
    service = serve()
    ticket = service.submit(PROMPT, max_tokens=9)
    service.call(lambda engine: service.close(drain=True))
    assert ticket.result(TIMEOUT).tokens == reference(9)
    with pytest.raises(RuntimeError, match="closed"):
        service.submit(PROMPT)


def test_a_service_that_is_not_running_says_so(engine):
    service = EngineService(engine)
    assert not service.is_running
    with pytest.raises(RuntimeError, match="not started: expected a running one"):
        service.submit(PROMPT)
    with service:
        assert service.is_running
        with pytest.raises(RuntimeError, match="started before or closed: expected a new service"):
            service.start()
        ticket = service.submit(PROMPT, max_tokens=2)
        ticket.result(TIMEOUT)
    assert not service.is_running
    for call in (lambda: service.submit(PROMPT), lambda: service.call(lambda engine: 1)):
        with pytest.raises(RuntimeError, match="closed: expected a running one"):
            call()
    with pytest.raises(RuntimeError, match="started before"):
        service.start()
    ticket.abort()
    assert tokens_of(ticket) == reference(2)


def test_a_service_can_be_closed_before_it_was_started_and_then_not_be_started(engine):
    service = EngineService(engine)
    service.close()
    with pytest.raises(RuntimeError, match="started before or closed"):
        service.start()


@pytest.mark.slow
def test_a_closed_service_is_let_go(engine):
    service = EngineService(engine).start()
    service.close()
    remains = weakref.ref(service)
    del service
    gc.collect()
    assert remains() is None


@pytest.mark.slow
def test_a_forgotten_service_does_not_disturb_the_interpreters_end():
    code = """
import atexit
from tests.support.models.tiny_models import tiny_model
from mlx_paged import Engine
from mlx_paged import EngineService
atexit.register(lambda: print(ticket.done, service.error))  # runs after what is registered later
service = EngineService(Engine(tiny_model("llama"), block_size=4, num_blocks=512)).start()
ticket = service.submit([1, 2, 3], max_tokens=2000)
next(ticket)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True None\n", "")


def test_an_end_that_no_step_has_told_yet_is_not_lost(engine, serve):
    pause, service = Pause(engine, after=1), serve()
    ticket = service.submit(PROMPT, max_tokens=3)
    pause.wait()
    call = background(service.call, lambda engine: (engine._settle(), service.close()))
    service._calls.wait(2)
    pause.end()
    call.result(TIMEOUT)
    assert ticket.result(TIMEOUT).finish_reason is FinishReason.LENGTH
    assert tokens_of(ticket) == reference(3)


# Errors


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([VOCAB], {}, f"token {VOCAB}"),
        (PROMPT, {"max_tokens": 0}, "max_tokens is 0"),
        (PROMPT, {"max_tokens": 10_000}, "expected a shorter prompt"),
    ],
)
def test_a_mistake_is_raised_to_the_thread_that_made_it(serve, prompt, options, message):
    service = serve()
    good = service.submit(PROMPT, max_tokens=9)
    bad = background(lambda: service.submit(prompt, **options))
    assert isinstance(error := bad.exception(TIMEOUT), ValueError) and message in str(error)
    assert good.result(TIMEOUT).tokens == reference(9) and service.error is None


def test_when_a_step_raises_every_open_ticket_and_later_callers_learn_it(engine, serve):
    failure = MemoryError("out of device memory")
    pause, service = Pause(engine, after=4, error=failure), serve()
    tickets = submitted(service, [PROMPT] * 3, max_tokens=30)
    pause.wait()
    waiting = background(tickets[2].result, TIMEOUT)
    late = background(lambda: service.submit(PROMPT))
    service._calls.wait(2)
    pause.end()
    for ticket in tickets[:2]:
        tokens = []
        with pytest.raises(MemoryError) as raised:
            tokens.extend(output.token for output in ticket)
        assert raised.value is failure
    assert waiting.exception(TIMEOUT) is failure
    for refused in (late, background(lambda: service.submit(PROMPT))):
        assert isinstance(error := refused.exception(TIMEOUT), RuntimeError)
        assert "the service is failed" in str(error) and error.__cause__ is failure
    assert service.error is failure and not service.is_running


def test_outputs_before_a_failure_can_still_be_read(engine, serve):
    pause, service = Pause(engine, after=4, error=OSError()), serve()
    ticket = service.submit(PROMPT, max_tokens=30)
    pause.end()
    tokens = []
    with pytest.raises(OSError):
        for output in ticket:
            tokens.append(output.token)
    assert len(tokens) >= 4 and tokens == reference(30)[: len(tokens)]


def test_an_abort_that_fails_is_not_kept_from_the_reader(engine, serve, monkeypatch):
    failure, service = AssertionError("broken"), serve()
    pause = Pause(engine, after=2)
    ticket = service.submit(PROMPT, max_tokens=50)
    pause.wait()
    with monkeypatch.context() as broken:
        broken.setattr(engine, "abort", lambda request_id: (_ for _ in ()).throw(failure))
        ticket.abort()
        pause.end()
        with pytest.raises(AssertionError, match="broken"):
            ticket.result(TIMEOUT)
        service.close()
    assert service.error is failure
    engine.abort(ticket.request_id)


def test_calls_that_wait_behind_one_that_fails_are_refused(engine, serve, monkeypatch):
    failure = AssertionError("broken")
    pause, service = Pause(engine, after=2), serve()
    tickets = submitted(service, [PROMPT] * 4, max_tokens=50)
    pause.wait()
    with monkeypatch.context() as broken:
        broken.setattr(engine, "abort", lambda request_id: (_ for _ in ()).throw(failure))
        for ticket in tickets:
            ticket.abort()
        pause.end()
        for ticket in tickets:
            with pytest.raises(AssertionError, match="broken"):
                ticket.result(TIMEOUT)
        background(service.close).result(TIMEOUT)
    for ticket in tickets:
        engine.abort(ticket.request_id)


def test_a_request_that_was_ended_past_the_service_does_not_hang_its_reader(engine, serve):
    pause, service = Pause(engine, after=2), serve()
    ticket = service.submit(PROMPT, max_tokens=50)
    pause.wait()
    ended = background(service.call, lambda engine: engine.abort(ticket.request_id))
    service._calls.wait(2)
    pause.end()
    assert ended.result(TIMEOUT) is not None
    service.close(drain=True)
    with pytest.raises(RuntimeError, match="request 0 was ended by a call"):
        tokens_of(ticket)
