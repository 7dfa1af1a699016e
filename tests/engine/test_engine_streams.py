"""``Engine.stream``: when its request is added, and that a reader who goes away ends it."""

import gc
import threading

import pytest

from mlx_paged import Engine
from tests.support.models.tiny_models import solo_greedy

PROMPT = [5, 9, 77, 3, 21, 64, 8]
OTHER = PROMPT[::-1]


def assert_nothing_is_left(engine: Engine) -> None:
    assert not engine.has_work and engine.manager.blocks_in_use == 0
    assert not engine._streams
    engine.manager.check_integrity()


def test_the_request_is_added_by_the_call(model, engine):
    stream = engine.stream(PROMPT, max_tokens=6)
    assert engine.has_work
    engine.step()
    engine.step()
    assert [output.token for output in stream] == solo_greedy(model, PROMPT, 6)
    assert_nothing_is_left(engine)


def test_a_mistake_is_told_by_the_call(engine):
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.stream([])


def test_closing_a_stream_before_its_first_token_aborts_its_request(engine):
    stream = engine.stream(PROMPT, max_tokens=50)
    stream.close()
    assert_nothing_is_left(engine)
    assert next(stream, None) is None


def test_closing_a_stream_that_was_never_read_frees_its_blocks(engine):
    stream = engine.stream(PROMPT, max_tokens=50)
    engine.step()
    assert engine.manager.blocks_in_use > 0
    stream.close()
    assert_nothing_is_left(engine)


@pytest.mark.slow
@pytest.mark.parametrize("num_read", [0, 2])
def test_a_stream_that_nobody_refers_to_aborts_its_request(engine, num_read):
    stream = engine.stream(PROMPT, max_tokens=50)
    for _ in range(num_read):
        next(stream)
    del stream
    gc.collect()
    assert_nothing_is_left(engine)


def test_a_stream_that_was_read_to_its_end_leaves_nothing(engine):
    stream = engine.stream(PROMPT, max_tokens=3)
    assert len(list(stream)) == 3
    assert_nothing_is_left(engine)
    stream.close()
    assert next(stream, None) is None


def test_a_stream_whose_request_is_aborted_ends(engine):
    stream = engine.stream(PROMPT, max_tokens=50)
    first = next(stream)
    engine.abort(first.request_id)
    list(stream)  # what was computed before may still come
    assert_nothing_is_left(engine)


def test_a_stream_gives_the_tokens_of_a_step_that_a_fork_ended(model, engine):
    """A fork reads the step under way, and with it the stream's last token."""
    other = engine.add_request(OTHER, max_tokens=50)
    stream = engine.stream(PROMPT, max_tokens=8)
    outputs = [next(stream) for _ in range(7)]
    engine.fork(other)
    outputs += stream
    assert [output.token for output in outputs] == solo_greedy(model, PROMPT, 8)
    assert outputs[-1].completion is not None


def test_a_stream_that_is_dropped_within_a_step_does_not_disturb_it(model, engine):
    """As by the garbage collector, which may run at any time."""
    streams = [engine.stream(OTHER, max_tokens=50)]

    def drop(tokens, logits):
        if len(tokens) == len(PROMPT) + 3:
            streams.clear()
        return logits

    (completion,) = engine.generate([PROMPT], max_tokens=8, logits_processors=[drop])
    assert completion.tokens == solo_greedy(model, PROMPT, 8)
    assert engine.request(0) is None
    assert len(engine.step()) <= 1  # what that step computed for the stream
    assert_nothing_is_left(engine)


def test_a_stream_that_is_dropped_while_another_thread_steps_ends_with_the_next_step(model, engine):
    inside, dropped = threading.Event(), threading.Event()
    streams = [engine.stream(OTHER, max_tokens=50)]

    def wait(tokens, logits):
        inside.set()
        assert dropped.wait(60)
        return logits

    kept = engine.add_request(PROMPT, max_tokens=8, logits_processors=[wait])
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    assert inside.wait(60)
    streams.clear()
    dropped.set()
    stepping.join()
    tokens = []
    while engine.has_work:
        outputs = engine.step()
        assert list(engine._requests) in ([kept], [])
        tokens += [output.token for output in outputs if output.request_id == kept]
    assert solo_greedy(model, PROMPT, 8)[-len(tokens) :] == tokens and len(tokens) >= 6
    assert_nothing_is_left(engine)


def test_closing_a_stream_while_prompts_are_completed_ends_it_with_them(engine):
    stream = engine.stream(OTHER, max_tokens=50)
    engine.generate([PROMPT], max_tokens=4, on_output=lambda output: stream.close())
    assert_nothing_is_left(engine)
