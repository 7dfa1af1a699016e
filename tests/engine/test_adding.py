"""What callers add: arguments are checked before anything happens, and all is added or nothing."""

import math
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, SamplingParams
from mlx_paged.loading import load_model
from tests.support.models.tiny_models import VOCAB, solo_greedy

PROMPT = [5, 9, 77, 3, 21, 64, 8]
OTHER = PROMPT[::-1]


@pytest.fixture
def engine(model):
    return Engine(model, block_size=4, num_blocks=64, prefill_chunk=16, policy="priority")


@pytest.fixture(scope="module")
def demo_engine():
    return Engine(*load_model(), num_blocks=64)


def add_fork(engine: Engine, prompt=(), **options):
    return engine.fork(0, prompt, **options)


ADDERS = {
    "add_request": Engine.add_request,
    "add_samples": partial(Engine.add_samples, n=3),
    "add_beam_search": partial(Engine.add_beam_search, num_beams=3),
    "fork": add_fork,
}


def assert_only_the_parent_is_there(model, engine: Engine, parent: int) -> None:
    """And others can be added, in their order."""
    assert list(engine._requests) == [parent] and not engine._beams
    assert list(engine._outputs._stop_ids) == list(engine._outputs._texts or [parent]) == [parent]
    other = engine.add_request(OTHER, max_tokens=8)
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        engine.manager.check_integrity()
    assert list(done) == [parent, other]
    assert done[parent].tokens == solo_greedy(model, PROMPT, 8)
    assert done[other].tokens == solo_greedy(model, OTHER, 8)
    assert engine.manager.blocks_in_use == 0 and not engine.scheduler.parked


BAD_OPTIONS = [
    ({"priority": "a"}, "priority is 'a': expected a number or \"background\""),
    ({"priority": None}, "priority is None: expected a number"),
    ({"priority": True}, "priority is True: expected a number"),
    ({"priority": float("nan")}, "priority is nan: expected a number"),
    ({"cache_salt": 5}, "cache_salt is 5: expected a string"),
    ({"cache_salt": b"x"}, "cache_salt is b'x': expected a string"),
    ({"share": "alice"}, "share is 'alice': expected a sequence of names"),
    ({"share": ("alice", "")}, "share is .*: expected a sequence of names that are not empty"),
    ({"keep": "no"}, "keep is 'no': expected True or False"),
    ({"params": {"max_tokens": 4}}, "params is {'max_tokens': 4}: expected SamplingParams"),
    ({"params": SamplingParams(), "top_k": 3}, "both params and options"),
    ({"logit_bias": {VOCAB: 1.0}}, f"names token {VOCAB}: expected token ids below {VOCAB}"),
    ({"max_tokens": 10**6}, "expected a shorter prompt"),
]
TAKES = {
    "add_request": {"priority", "cache_salt", "share", "keep"},
    "add_samples": {"priority", "cache_salt", "share"},
    "add_beam_search": {"priority", "cache_salt", "share"},
    "fork": {"keep"},
}
BAD_CALLS = [
    (name, options, message)
    for name, takes in TAKES.items()
    for options, message in BAD_OPTIONS
    if options.keys() <= takes
    or options.keys().isdisjoint({"priority", "cache_salt", "share", "keep"})
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "options", "message"),
    BAD_CALLS,
    ids=[f"{name} {next(iter(options))} {i}" for i, (name, options, _) in enumerate(BAD_CALLS)],
)
def test_a_bad_argument_adds_nothing(model, engine, name, options, message):
    parent = engine.add_request(PROMPT, max_tokens=8)
    with pytest.raises(ValueError) as error:
        ADDERS[name](engine, PROMPT, **options)
    assert message in str(error.value)
    assert_only_the_parent_is_there(model, engine, parent)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add_samples(PROMPT, "3"), "n is '3': expected an integer >= 1"),
        (lambda e: e.add_samples(PROMPT, True), "n is True: expected an integer >= 1"),
        (lambda e: e.add_samples(PROMPT, 2.0), "n is 2.0: expected an integer >= 1"),
        (lambda e: e.sample([PROMPT], "3"), "n is '3' and best_of None"),
        (lambda e: e.add_beam_search(PROMPT, 10**6), f"an integer from 1 to {VOCAB}"),
        (lambda e: e.add_beam_search(PROMPT, VOCAB + 1), f"an integer from 1 to {VOCAB}"),
        (lambda e: e.add_beam_search(PROMPT, True), "num_beams is True"),
        (lambda e: e.add_beam_search(PROMPT, "2"), "num_beams is '2'"),
        (lambda e: e.add_beam_search(PROMPT, 2, length_penalty="x"), "length_penalty is 'x'"),
        (lambda e: e.add_beam_search(PROMPT, 2, length_penalty=math.nan), "length_penalty is nan"),
        (
            lambda e: e.add_beam_search(PROMPT, 2, length_penalty=251, max_tokens=16),
            "length_penalty is 251: expected -250 to 250 for max_tokens 16",
        ),
        (lambda e: e.add_beam_search(PROMPT, 2, early_stopping="no"), "early_stopping is 'no'"),
    ],
)
def test_mistakes_of_samples_and_beams_are_named(model, engine, call, message):
    parent = engine.add_request(PROMPT, max_tokens=8)
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert_only_the_parent_is_there(model, engine, parent)


def test_as_many_beams_as_tokens_can_be_searched(model):
    engine = Engine(model, block_size=4, num_blocks=2 * VOCAB)
    completion = engine.beam_search(PROMPT, VOCAB, max_tokens=2)
    assert len(completion.beams) == VOCAB


def test_without_a_known_vocabulary_the_pool_bounds_the_beams(engine):
    engine.token_ids.columns = None
    with pytest.raises(ValueError, match="num_beams is 65: expected an integer from 1 to 64"):
        engine.add_beam_search(PROMPT, 65)


class Failure(Exception):
    pass


FAILING_PARTS = {
    "the queue": lambda engine: (engine.scheduler, "add"),
    "the tokenizer": lambda engine: (engine._outputs, "add"),
    "the fork of its blocks": lambda engine: (engine.scheduler.allocator, "fork"),
}
FAILURES = [(name, "the tokenizer") for name in ADDERS] + [
    ("add_request", "the queue"),
    ("add_samples", "the queue"),
    ("add_beam_search", "the queue"),
    ("fork", "the fork of its blocks"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "part"), FAILURES)
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
def test_a_failure_half_way_adds_nothing(model, engine, monkeypatch, name, part, error):
    """Each part has done its work when it fails."""
    parent = engine.add_request(PROMPT, max_tokens=8)
    while not engine.scheduler.running:
        engine.step()
    owner, method = FAILING_PARTS[part](engine)
    whole = getattr(owner, method)

    def fail(*arguments, **options):
        whole(*arguments, **options)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        with pytest.raises(error):
            ADDERS[name](engine, [] if name == "fork" else OTHER, max_tokens=8)
    assert_only_the_parent_is_there(model, engine, parent)


# Prompts

NO_PROMPTS = {
    "a fraction": ([1.9], "prompt has token 1.9: expected integers"),
    "a whole float": ([1, 2.0], "prompt has token 2.0: expected integers"),
    "strings": (["17", "3"], "prompt has token '17': expected integers"),
    "a flag": ([True], "prompt has token True: expected integers"),
    "nothing": ([1, None], "prompt has token None: expected integers"),
    "prompts": ([[1, 2], [3]], "prompt has token [1, 2]: expected integers"),
    "an array of floats": (np.array([1.5]), "prompt has token 1.5: expected integers"),
    "an array of flags": (np.array([True]), "prompt has token True: expected integers"),
    "an mx.array of floats": (mx.array([1.5]), "prompt has token 1.5: expected integers"),
    "a matrix": (mx.array([[1, 2]]), "prompt has token [1, 2]: expected integers"),
    "bytes": (b"abc", "prompt is b'abc': expected text or a sequence of token ids"),
    "a bytearray": (bytearray(b"abc"), "prompt is bytearray(b'abc'): expected"),
    "a set": ({3, 4}, "prompt is {3, 4}: expected"),
    "a mapping": ({3: 4}, "prompt is {3: 4}: expected"),
    "a number": (3, "prompt is 3: expected"),
    "no prompt": (None, "prompt is None: expected"),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("prompt", "message"), NO_PROMPTS.values(), ids=NO_PROMPTS)
@pytest.mark.parametrize("name", ADDERS)
def test_what_is_no_prompt_is_named(model, engine, name, prompt, message):
    parent = engine.add_request(PROMPT, max_tokens=8)
    with pytest.raises(ValueError) as error:
        ADDERS[name](engine, prompt, max_tokens=8)
    assert message in str(error.value)
    assert_only_the_parent_is_there(model, engine, parent)


PROMPTS = {
    "a list": PROMPT,
    "a tuple": tuple(PROMPT),
    "an array": np.array(PROMPT),
    "unsigned numbers": np.array(PROMPT, np.uint16),
    "NumPy's numbers": list(np.array(PROMPT)),
    "an mx.array": mx.array(PROMPT),
    "an mx.array's numbers": list(mx.array(PROMPT)),
    "an iterator": iter(PROMPT),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_integers_of_all_kinds_are_token_ids(model, engine, prompt):
    (completion,) = engine.generate([prompt], max_tokens=4)
    assert completion.tokens == solo_greedy(model, PROMPT, 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_tokens_of_one_prompt_are_one_prompt(model, engine, prompt):
    expected = solo_greedy(model, PROMPT, 4)
    prompt = iter(PROMPT) if hasattr(prompt, "__next__") else prompt
    (completion,) = engine.generate(prompt, max_tokens=4)
    ((sample,),) = engine.sample(PROMPT, n=1, max_tokens=4)
    assert completion.tokens == sample.tokens == expected


@pytest.mark.parametrize("prompts", [[[3], [4]], np.array([[3], [4]]), ([3], mx.array([4]))])
def test_several_prompts_stay_several(engine, prompts):
    assert len(engine.generate(prompts, max_tokens=1)) == 2
    assert [len(group) for group in engine.sample(iter(prompts), n=3, max_tokens=1)] == [3, 3]


def test_one_text_is_one_prompt(demo_engine):
    (completion,) = demo_engine.generate("import os", max_tokens=8)
    ((sample, _),) = demo_engine.sample("import os", n=2, max_tokens=8)
    (same,) = demo_engine.generate(["import os"], max_tokens=8)
    assert completion.text == sample.text == same.text != ""
    assert completion.prompt_tokens == len(demo_engine.tokenizer.encode("import os"))


@pytest.mark.parametrize("prompts", [None, 3, b"abc", {"import os"}, {"prompt": "import os"}])
def test_what_holds_no_prompts_is_named(engine, prompts):
    for call in (engine.generate, partial(engine.sample, n=2)):
        with pytest.raises(ValueError, match=r"prompts is .*: expected text, token ids, or a seq"):
            call(prompts)
    assert not engine.has_work


@pytest.mark.parametrize("name", ["stream", "beam_search", "add_request"])
def test_calls_of_one_prompt_refuse_several(demo_engine, name):
    options = {"num_beams": 2} if name == "beam_search" else {}
    with pytest.raises(ValueError, match=r"prompt has token 'class A:': expected .* or one text"):
        getattr(demo_engine, name)(["class A:", "import os"], **options)


@pytest.mark.parametrize("suffix", [(), "", [], np.array([], np.int32), mx.array([7, 3])])
def test_a_fork_may_begin_with_what_its_parent_has(engine, suffix):
    parent = engine.add_request(PROMPT, max_tokens=4)
    child = engine.fork(parent, suffix)
    assert engine.request(child).tokens[: len(PROMPT)] == PROMPT
    assert len(engine.request(child).tokens) == len(PROMPT) + len(suffix)


@pytest.mark.parametrize("name", ["fork", "abort", "release"])
@pytest.mark.parametrize("request_id", [[0], None, "0", 0.5])
def test_a_request_id_is_an_integer(engine, name, request_id):
    with pytest.raises(ValueError, match=rf"^\[{name}\] request_id is .*: expected an integer"):
        getattr(engine, name)(request_id)
