"""Token ids from outside index the embedding and the logits only where these have them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged import BatchGenerator, Engine
from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.prompt import Prompt
from mlx_paged.request import FinishReason
from mlx_paged.runner.model_probe import probe
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.image_spans import ImageSpans
from tests.support.commands.server_harness import demo
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, build
from tests.support.models.tiny_models import tiny_model

ROWS, COLUMNS = 90, 64
PROMPT = [5, 9, 33, 3, 21, 60, 8]
HUGE = [2**31 - 1, 2**31, 2**32 + 3, 2**40 + 5, 2**63, 2**64, 10**30]
END = 70  # an end-of-sequence token beyond the columns


def model_of(rows: int, columns: int) -> nn.Module:
    """A model whose embedding has another size than its logits."""
    model = tiny_model("llama", vocab_size=columns, tie_word_embeddings=False)
    width = model.args.hidden_size
    model.model.embed_tokens = nn.Embedding(rows, width)
    model.model.embed_tokens.weight = mx.random.normal((rows, width), key=mx.random.key(5))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def model():
    return model_of(ROWS, COLUMNS)


@pytest.fixture
def engine(model):
    made = Engine(model, block_size=4, num_blocks=64, prewarm=False)
    yield made
    assert not made.has_work and made.manager.blocks_in_use == 0


def assert_goes_on(engine) -> None:
    """A good request is answered."""
    (done,) = engine.generate([PROMPT], max_tokens=3)
    assert done.finish_reason is FinishReason.LENGTH and len(done.tokens) == 3


OPTIONS = {
    "stop_token_ids": lambda token: {"stop_token_ids": [3, token]},
    "logit_bias": lambda token: {"logit_bias": {3: 1.0, token: 5.0}},
    "xtc_special_tokens": lambda token: {"xtc_special_tokens": [token], "xtc_probability": 1.0},
}
CALLS = {
    "add_request": lambda engine, prompt, **options: engine.add_request(prompt, **options),
    "add_samples": lambda engine, prompt, **options: engine.add_samples(prompt, 2, **options),
    "add_beam_search": lambda e, prompt, **options: e.add_beam_search(prompt, 2, **options),
    "generate": lambda engine, prompt, **options: engine.generate([prompt], **options),
    "stream": lambda engine, prompt, **options: engine.stream(prompt, **options),
    "sample": lambda engine, prompt, **options: engine.sample([prompt], 1, **options),
}


@pytest.mark.parametrize("token", [COLUMNS, ROWS - 1, ROWS, *HUGE])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_options_name_tokens_that_can_be_chosen(engine, call, name, token):
    with pytest.raises(ValueError, match=f"{name} names token {token}: expected token ids below"):
        CALLS[call](engine, PROMPT, max_tokens=2, **OPTIONS[name](token))
    assert_goes_on(engine)


@pytest.mark.parametrize("token", [-1, ROWS, *HUGE, -(10**30)])
@pytest.mark.parametrize("call", CALLS)
def test_prompts_have_tokens_of_the_embedding(engine, call, token):
    with pytest.raises(ValueError, match=rf"prompt has token {token}: expected ids in \[0, 90\)"):
        CALLS[call](engine, [1, token, 2], max_tokens=2)
    assert_goes_on(engine)


@pytest.mark.parametrize("token", [-1, ROWS, 10**30])
def test_suffixes_of_forks_have_tokens_of_the_embedding(engine, token):
    parent = engine.add_request(PROMPT, max_tokens=2, keep=True)
    while engine.has_work:
        engine.step()
    with pytest.raises(ValueError, match="prompt has token"):
        engine.fork(parent, [token])
    for name, make in OPTIONS.items():
        with pytest.raises(ValueError, match=f"{name} names token"):
            engine.fork(parent, [1], **make(COLUMNS))
    engine.release(parent)


@pytest.mark.parametrize("token", [-200, ROWS, 10**30])
def test_prompts_with_images_have_tokens_of_the_embedding(engine, token):
    tokens = [1, token, 2]
    seen = Prompt(tokens, ImageSpans(tokens, [], np.zeros(3, bool)))
    with pytest.raises(ValueError, match=f"prompt has token {token}"):
        engine.add_request(seen, max_tokens=2)


@pytest.mark.parametrize("token", [-1, ROWS, 10**30])
def test_batch_generators_check_them(model, token):
    generator = BatchGenerator(model, num_blocks=64)
    with pytest.raises(ValueError, match="prompt has token"):
        generator.insert([[1, token]])
    with pytest.raises(ValueError, match="prompt has token"):
        generator.insert([[1]], all_tokens=[[token]])
    for name, make in OPTIONS.items():
        with pytest.raises(ValueError, match=f"{name} names token {COLUMNS}"):
            generator.insert([[1]], params=[SamplingParams(**make(COLUMNS))])
    assert generator.next() == ([], [])


def scores(model, prompt) -> np.ndarray:
    logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float64)


@pytest.mark.parametrize("place", range(4))
def test_a_prompt_token_that_cannot_be_chosen_is_read_and_has_no_log_probability(engine, place):
    prompt = [5, 9, 33, 3]
    prompt[place] = ROWS - 1
    expected = scores(engine.runner.model, prompt)
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    (done,) = engine.generate([prompt], max_tokens=1, prompt_logprobs=2)
    assert done.tokens == [expected[-1].argmax()]
    for i, told in enumerate(done.prompt_logprobs):
        if i in (0, place):
            assert told is None
        else:
            assert told.logprob == pytest.approx(expected[i - 1, prompt[i]], abs=1e-4)
    (done,) = engine.generate([prompt], max_tokens=6, **penalties)
    assert len(done.tokens) == 6 and max(done.tokens) < COLUMNS


class Tokenizer:
    """The demo model's, with another end-of-sequence token."""

    def __init__(self, tokenizer, end):
        self.whole, self.eos_token_ids = tokenizer, {end}

    def __getattr__(self, name):
        return getattr(self.whole, name)


@pytest.fixture(scope="module")
def ended(model):
    """An engine whose tokenizer ends with a token that the model never chooses."""
    return Engine(model, Tokenizer(demo()[1], END), num_blocks=64, prewarm=False)


def test_a_tokenizers_own_end_beyond_the_columns_is_left_out(ended):
    assert_goes_on(ended)
    options = {"stop_token_ids": [3, END], "xtc_special_tokens": [END], "xtc_probability": 1.0}
    (done,) = ended.generate([PROMPT], max_tokens=3, temperature=1.0, seed=1, **options)
    assert done.error is None
    for name, make in OPTIONS.items():
        with pytest.raises(ValueError, match=f"{name} names token {END + 1}"):
            ended.add_request(PROMPT, **make(END + 1))
    assert ended.token_ids.with_columns([3, END, 10**30, -1]) == [3]


def test_a_grammar_demands_no_token_that_the_model_lacks(ended):
    """Each token of the tokenizer has a name in a grammar."""
    options = {"max_tokens": 4}
    for grammar in (f"start: <[{ROWS + 1}]>", f"start: <[{COLUMNS}]> <[3]>"):
        with pytest.raises(ValueError, match="the grammar demands token"):
            ended.add_request(PROMPT, grammar=grammar, **options)
    late = f"start: (<[3]> | <[4]>) <[{ROWS + 1}]>"
    good = ended.add_request(PROMPT, **options)
    bad = ended.add_request(PROMPT, grammar=late, **options)
    done = {}
    while ended.has_work:
        done |= {o.request_id: o.completion for o in ended.step() if o.completion}
    assert done[bad].finish_reason is FinishReason.ERROR and "demands token" in done[bad].error
    assert done[good].error is None and len(done[good].tokens) == 4


@pytest.mark.parametrize("lookahead", [True, False])
def test_a_choice_that_the_embedding_does_not_have_ends_its_request(lookahead):
    """A bias alone can bring it."""
    engine = Engine(model_of(48, 64), num_blocks=64, prewarm=False, lookahead=lookahead)
    assert engine.token_ids.num_usable == 48
    good = engine.add_request([1, 2, 3], max_tokens=6, logit_bias=dict.fromkeys(range(48), 50.0))
    bad = engine.add_request([1, 2, 3], max_tokens=6, logit_bias={60: 100.0})
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert "embedding does not have the chosen token 60" in done[bad].error
    assert done[good].error is None and len(done[good].tokens) == 6
    with pytest.raises(ValueError, match=r"prompt has token 48: expected ids in \[0, 48\)"):
        engine.add_request([48])


OUTSIDE = {
    "the first beyond": mx.array([COLUMNS]),
    "below 0": mx.array([-1]),
    "unsigned": mx.array([ROWS], mx.uint8),
    "2**31 - 1": mx.array([2**31 - 1]),
    "2**40": mx.array([2**40], mx.int64),
    "2**32 + 3": mx.array([2**32 + 3], mx.int64),
    "the largest": mx.array(np.array([2**64 - 1], np.uint64)),
}


@pytest.mark.parametrize("given", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "plain"])
def test_a_callers_sampler_that_returns_no_token_ends_its_request_alone(model, given, lookahead):
    """At its first token, or later."""
    engine = Engine(model, block_size=4, num_blocks=64, lookahead=lookahead, prewarm=False)
    expected = [c.tokens for c in engine.generate([PROMPT, PROMPT[::-1]], max_tokens=8)]

    def late(calls=[]):  # noqa: B006
        calls.append(1)
        return len(calls) > 3

    def sampler(logprobs):
        return given if late() else mx.argmax(logprobs, axis=-1)

    others = [engine.add_request(p, max_tokens=8) for p in (PROMPT, PROMPT[::-1])]
    own = {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    others.append(engine.add_request(PROMPT, max_tokens=8, **own))
    bad = [engine.add_request(PROMPT, max_tokens=8, sampler=s) for s in (lambda _: given, sampler)]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert [done[i].tokens for i in others] == [*expected, expected[0]]
    for request_id, count in zip(bad, (0, 3), strict=True):
        completion = done[request_id]
        assert completion.finish_reason is FinishReason.ERROR
        assert completion.error.startswith("ValueError: [SamplingParams] sampler returned token")
        assert completion.tokens == expected[0][:count]
    assert engine.manager.blocks_in_use == 0 and engine.stats.faults == 0


SURROGATES = ["\ud800", "a\udfffb", "\udc80" * 3]


@pytest.mark.parametrize("text", SURROGATES, ids=ascii)
def test_text_that_utf_8_cannot_encode_is_refused_by_name(text):
    engine = Engine(*demo(), num_blocks=64, prewarm=False)
    for call in CALLS.values():
        with pytest.raises(ValueError, match="prompt has a lone surrogate at"):
            call(engine, text, max_tokens=2)
    with pytest.raises(ValueError, match="cache_salt has a lone surrogate at"):
        engine.add_request("x", cache_salt=text)
    parent = engine.add_request("x = 1", max_tokens=2)
    with pytest.raises(ValueError, match="prompt has a lone surrogate at"):
        engine.fork(parent, text)
    engine.abort(parent)
    (done,) = engine.generate(["x = 1"], max_tokens=2, stop=text)
    assert len(done.tokens) == 2
    for name in ("regex", "grammar", "json_schema"):
        with pytest.raises(ValueError, match=f"{name}"):
            engine.add_request("x", **{name: text})


def test_beams_are_bounded_on_models_that_do_not_tell_their_vocabulary():
    model = build("phixtral")
    assert getattr(model.args, "vocab_size", None) is None
    engine = Engine(model, num_blocks=400, prewarm=False)
    with pytest.raises(ValueError, match="num_beams is 65: expected an integer from 1 to 64"):
        engine.add_beam_search([1, 2], 65)
    best = engine.beam_search([1, 2], 64, max_tokens=2)
    assert len(best.beams) == 64 and len({tuple(beam.tokens) for beam in best.beams}) == 64


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(NOT_ON_A_CPU)))
def test_the_sizes_of_every_architecture_are_found(name):
    """Though many do not tell them. Their layers stay as they are."""
    model = build(name)
    kinds = [type(module) for _, module in model.named_modules()]
    try:
        profile = probe(model)
    except ValueError:
        pytest.skip("refused")
    bare = [kind for kind in kinds if issubclass(kind, nn.Embedding)]
    assert bare and profile.embedding_rows == profile.logit_columns
    assert profile.embedding_rows in (64, 100352)
    again = probe(model)
    assert again == profile
    names = [kind.__name__ for kind in kinds]
    assert [type(module).__name__ for _, module in model.named_modules()] == names


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (64, 96)])
def test_an_embedding_may_have_another_size_than_the_logits(rows, columns, quantize):
    model = model_of(rows, columns)
    if quantize:
        nn.quantize(model, group_size=32, bits=8)
    profile = probe(model)
    assert (profile.embedding_rows, profile.logit_columns) == (rows, columns)


def test_unknown_sizes_bound_nothing_but_the_sign():
    ids = TokenIds(None, None)
    ids.check_prompt("x", [10**30])
    ids.check_params(SamplingParams(stop_token_ids=[10**30]))
    with pytest.raises(ValueError, match="prompt has token -1"):
        ids.check_prompt("x", [-1])
