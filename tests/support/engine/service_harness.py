"""A service under test: paused engines, threads of clients, and what each prompt gives alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from queue import SimpleQueue

from mlx_paged import FinishReason
from tests.support import TIMEOUT
from tests.support.models.tiny_models import solo_greedy, tiny_model

THREAD = "mlx_paged.engine.service"
PROMPT = [5, 9, 77, 3, 21, 64, 8]
OTHER = PROMPT[::-1]


@lru_cache
def model(model_type="llama"):
    return tiny_model(model_type)


@lru_cache
def solo(prompt: tuple[int, ...], num_tokens: int, model_type="llama"):
    return solo_greedy(model(model_type), list(prompt), num_tokens)


def reference(num_tokens, prompt=PROMPT):
    return solo(tuple(prompt), num_tokens)


class Pause:
    """The engine's thread waits in `step` once `after` outputs were given; then it may raise."""

    def __init__(self, engine, after, error=None):
        self.reached, self.over = threading.Event(), threading.Event()
        self.given, self.step = 0, engine.step
        self.after, self.error = after, error
        engine.step = self

    def __call__(self):
        if self.given >= self.after:
            self.reached.set()
            assert self.over.wait(TIMEOUT)
            if self.error is not None:
                raise self.error
        outputs = self.step()
        self.given += len(outputs)
        return outputs

    def wait(self):
        assert self.reached.wait(TIMEOUT)

    def end(self):
        self.over.set()


class CountedQueue:
    """A service's queue that tells when so many calls were put."""

    def __init__(self):
        self.queue, self.puts = SimpleQueue(), threading.Semaphore(0)
        self.get, self.get_nowait = self.queue.get, self.queue.get_nowait
        self.qsize, self.empty = self.queue.qsize, self.queue.empty

    def put(self, item):
        self.queue.put(item)
        self.puts.release()

    def wait(self, puts):
        for _ in range(puts):
            assert self.puts.acquire(timeout=TIMEOUT)


def submitted(service, prompts, max_tokens):
    """Tickets of requests that one call adds, so that all are there before the next step."""
    return service.adopt(
        lambda engine: [engine.add_request(prompt, max_tokens=max_tokens) for prompt in prompts]
    )


def background(function, *args):
    """A future of the function's value, computed on a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def tokens_of(outputs):
    return [output.token for output in outputs]


def assert_aborted(ticket, tokens):
    completion = ticket.result(TIMEOUT)
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.tokens == tokens == reference(50)[: len(tokens)]
