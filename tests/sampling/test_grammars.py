"""The tokens of a request follow its grammar, in every batch, and nothing else changes."""

import copy
import json
import random
import re

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from jsonschema import validate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import Engine, FinishReason, SamplingParams, demo_model_path
from mlx_paged.sampling.grammar import Grammars
from mlx_paged.sampling_params import JSON_STYLE
from mlx_paged.scheduler.speculation import Speculation
from tests.support.commands.server_harness import demo
from tests.support.engine.structured_runs import PROMPTS, SCHEMA, make_engine, run
from tests.support.random_schemas import random_schema
from tests.support.simulation.injected_drafts import InjectedDrafter, every_guess
from tests.support.simulation.solo_runs import solo_run
from tests.support.simulation.structured_calls import SCHEMAS, structured_solo

SOURCES = [
    {"json_schema": SCHEMA},
    {"regex": "(ab|cd){3}[0-9]{2}"},
    {"grammar": 'start: "if " NAME " in (" NAME ("," NAME)~1..2 "):"\nNAME: /[a-z]{1,5}/'},
    {"json_schema": random_schema(3)},
    {"json_schema": random_schema(5)},
    {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}'},
    {"regex": 'x = "[^"\\n]{2,9}"'},
    {"grammar": 'start: "yes" | "no"'},
]


def check(completion, source):
    """The text follows the source, if it has ended."""
    assert completion.error is None and completion.finish_reason in ("stop", "length")
    if completion.finish_reason == "length":
        return
    if "json_schema" in source:
        schema = source["json_schema"]
        schema = json.loads(schema) if isinstance(schema, str) else schema
        validate(json.loads(completion.text), schema)
    elif "regex" in source:
        assert re.fullmatch(source["regex"], completion.text)
    else:
        names = r"[a-z]{1,5}"
        pattern = rf"if {names} in \({names}(,{names}){{1,2}}\):|yes|no"
        assert re.fullmatch(pattern, completion.text)


def masked_greedy(prompt, source, max_tokens):
    """Mask, then argmax, on mlx-lm's logits. Text that is forced is tokenized by llguidance."""
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    model, tokenizer = demo()
    tokens = from_tokenizer(tokenizer._tokenizer, None, sorted(tokenizer.eos_token_ids))
    (kind, text), *_ = source.items()
    text = text if isinstance(text, str) else json.dumps(text)
    made = {
        "json_schema": lambda: llguidance.LLMatcher.grammar_from_json_schema(
            text, defaults=JSON_STYLE
        ),
        "regex": lambda: llguidance.LLMatcher.grammar_from_regex(text),
        "grammar": lambda: llguidance.LLMatcher.grammar_from_lark(text),
    }
    matcher = llguidance.LLMatcher(tokens, made[kind]())
    cache, given, found = make_prompt_cache(model), tokenizer.encode(prompt), []
    while len(found) < max_tokens and (not found or found[-1] not in tokenizer.eos_token_ids):
        logits = model(mx.array(given)[None], cache=cache)[0, -1]
        given = matcher.compute_ff_tokens()
        if not given:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=logits.size, bitorder="little").astype(bool)
            given = [int(np.where(allowed, np.array(logits), -np.inf).argmax())]
        matcher.consume_tokens(given)
        found += given
    return found[:max_tokens]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source)[:40])
def test_greedy_output_is_mask_then_argmax_on_mlx_lms_logits(source):
    engine = make_engine()
    options = {"max_tokens": 60} | source
    done, *_ = run(engine, [(prompt, options) for prompt in PROMPTS])
    for prompt, completion in zip(PROMPTS, done, strict=True):
        check(completion, source)
        assert completion.tokens == masked_greedy(prompt, source, 60)


def mixed_requests():
    """Greedy and drawn rows with all sources, and rows without a grammar, some with processors."""

    def processor(tokens, logits):
        return logits + 0.3 * (mx.arange(logits.size) % 7 == tokens[-1] % 7)

    options = {"max_tokens": 60, "repetition_penalty": 1.2}
    requests = [
        (PROMPTS[i % 6], options | source | {"temperature": float(t), "seed": i})
        for i, source in enumerate(SOURCES)
        for t in (0, 1)
    ]
    free = [(prompt, {"max_tokens": 40, "logits_processors": (processor,)}) for prompt in PROMPTS]
    free += [(p, {"max_tokens": 30, "temperature": 0.9, "seed": 4}) for p in PROMPTS[:3]]
    free += [(PROMPTS[0], options)]
    return requests, free


@pytest.mark.slow
def test_lookahead_and_forced_tokens_change_no_token():
    requests, free = mixed_requests()
    alone = [c.tokens for c in run(make_engine(), free)[0]]
    found, counts = [], []
    for lookahead in (True, False):
        for fast_forward in (True, False):
            engine = make_engine(lookahead=lookahead)
            engine.constraints.fast_forward = fast_forward
            done, *_ = run(engine, requests + free)
            found.append([c.tokens for c in done[: len(requests)]])
            assert [c.tokens for c in done[len(requests) :]] == alone
            counts.append(run(make_engine_like(engine, fast_forward), requests[:2])[2])
    assert found[0] == found[1] == found[2] == found[3]
    assert counts[0] < 0.8 * counts[1]


def make_engine_like(engine, fast_forward):
    other = make_engine(lookahead=engine.lookahead)
    other.constraints.fast_forward = fast_forward
    return other


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_finished_outputs_of_random_schemas_validate(seed):
    schemas = [random_schema(index) for index in range(10 * seed, 10 * seed + 10)]
    options = [
        {"json_schema": s, "max_tokens": 300, "temperature": 1.0, "seed": i}
        for i, s in enumerate(schemas)
    ]
    engine = make_engine(num_blocks=400)
    done, *_ = run(engine, [(PROMPTS[i % 6], own) for i, own in enumerate(options)])
    for completion, own in zip(done, options, strict=True):
        check(completion, own)
    assert sum(c.finish_reason == "stop" for c in done) >= 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lookahead", [True, False])
def test_a_batch_survives_preemption_and_forks(lookahead):
    """16 rows, 8 sources, a pool that is too small, children of running requests."""
    requests = [
        (PROMPTS[i % 6], SOURCES[i % 8] | {"max_tokens": 50, "temperature": 1.0, "seed": i})
        for i in range(16)
    ]
    expected = [c.tokens for c in run(make_engine(), requests)[0]]
    children = {}

    def fork(engine, step):
        for request_id in range(16):
            request = engine.request(request_id)
            if step % 5 == 0 and request is not None and len(request.generated) > 2:
                child = engine.fork(request_id)
                children[child] = (request_id, engine.request(child).tokens[request.num_prompt :])

    engine = make_engine(num_blocks=24, block_size=4, lookahead=lookahead)
    done, everyone, _ = run(engine, requests, fork)
    assert [c.tokens for c in done] == expected
    assert sum(c.preemptions for c in everyone.values()) >= 2 and len(children) > 10
    for completion, (_, options) in zip(done, requests, strict=True):
        check(completion, {k: options[k] for k in compiler_kinds(options)})
    tokenizer = demo()[1]
    for child, (parent, begun) in children.items():
        source = SOURCES[parent % 8]
        whole = [*begun, *everyone[child].tokens]
        if everyone[child].finish_reason == "stop" and "json_schema" in source:
            text = tokenizer.decode([t for t in whole if t not in tokenizer.eos_token_ids])
            validate(json.loads(text), json.loads(SamplingParams(**source).json_schema))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_drafts_are_masked_by_what_is_before_them(monkeypatch, share, temperature):
    """Right and wrong drafts change no token; right ones are accepted."""
    monkeypatch.setattr(Speculation, "_depths", every_guess)
    solo, engine = structured_solo(), make_engine()
    scheduler = engine.scheduler
    drafter = InjectedDrafter(random.Random(1), solo, share)
    scheduler.decoding = Speculation([drafter], scheduler.allocator, scheduler.budget)
    params = [
        SamplingParams(json_schema=schema, max_tokens=60, temperature=temperature, seed=seed)
        for seed, schema in enumerate(SCHEMAS * 3)
    ]
    done = engine.generate([[5 + p.seed, 7, 9] for p in params], params)
    for completion, own in zip(done, params, strict=True):
        expected = solo_run(solo, [5 + own.seed, 7, 9], own, own.seed, b"")
        assert (completion.tokens, completion.finish_reason) == (expected.tokens, expected.reason)
    drafts, accepted = engine.stats.drafts, engine.stats.accepted_drafts
    assert drafts > 5 and (share == 0.6 or accepted == share * drafts)


def compiler_kinds(options):
    return [kind for kind in ("json_schema", "regex", "grammar") if kind in options]


def test_samples_and_beams_follow_the_grammar():
    engine = make_engine()
    (samples,) = engine.sample([PROMPTS[0]], 5, json_schema=SCHEMA, temperature=1.0, max_tokens=80)
    for completion in samples:
        check(completion, {"json_schema": SCHEMA})
    assert len({c.text for c in samples}) > 1
    search = engine.beam_search(PROMPTS[0], 3, regex="(ab|cd){3}[0-9]", max_tokens=20)
    assert len(search.beams) == 3
    for beam in search.beams:
        assert beam.finish_reason != "stop" or re.fullmatch("(ab|cd){3}[0-9]", beam.text)


def test_a_child_goes_on_in_the_grammar_and_its_suffix_must_be_allowed():
    engine = make_engine()
    parent = engine.add_request(PROMPTS[0], regex="abc[0-9]{3}xyz", max_tokens=30)
    while not engine.request(parent).generated:
        engine.step()
    with pytest.raises(ValueError, match="the grammar does not allow token"):
        engine.fork(parent, suffix="?")
    fresh = engine.fork(parent, regex="[0-9]{2}", max_tokens=9)
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert re.fullmatch("abc[0-9]{3}xyz", done[parent].text)
    assert re.fullmatch("[0-9]{2}", done[fresh].text)


def test_logprobs_are_of_the_tokens_that_may_follow():
    (completion,) = make_engine().generate(
        [PROMPTS[0]], regex="name: (a|b)[0-9]", max_tokens=20, logprobs=5
    )
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.top_logprobs)
    assert completion.logprobs[0] == 0.0  # "name: " is forced
    for pairs in completion.top_logprobs:
        assert np.exp([p for _, p in pairs]).sum() <= 1 + 1e-5
        assert all(np.isfinite(p) for _, p in pairs)


def test_one_bad_sampler_ends_its_own_request_only():
    requests = [
        (PROMPTS[0], {"regex": "(a|b){9}", "sampler": lambda logprobs: mx.array([5])}),
        (PROMPTS[1], {"regex": "(a|b){9}", "max_tokens": 20}),
    ]
    (bad, good), *_ = run(make_engine(), requests)
    assert bad.finish_reason is FinishReason.ERROR and "does not allow token 5" in bad.error
    assert re.fullmatch("(a|b){9}", good.text)


def test_a_callers_sampler_is_not_asked_where_one_token_is_left():
    left = []

    def sampler(logprobs):
        left.append(mx.isfinite(logprobs).sum())
        return mx.argmax(logprobs, axis=-1)

    (completion,) = make_engine().generate(
        [PROMPTS[0]], regex="name: (a|b)[0-9]", max_tokens=20, sampler=sampler
    )
    assert re.fullmatch("name: (a|b)[0-9]", completion.text)
    assert left and min(each.item() for each in left) > 1


def test_an_aborted_request_does_not_stop_others():
    requests = [(prompt, {"regex": "(a|b){19}", "max_tokens": 30}) for prompt in PROMPTS[:3]]
    ended = []

    def abort(engine, step):
        if step == 4:
            ended.append(engine.abort(1))

    engine = make_engine()
    ids = [engine.add_request(prompt, **options) for prompt, options in requests]
    done, step = {}, 0
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        abort(engine, step := step + 1)
    assert [c.finish_reason for c in ended] == ["abort"] and done.keys() == {ids[0], ids[2]}
    for completion in done.values():
        assert re.fullmatch("(a|b){19}", completion.text)


END = "<|im_end|>"


def chat_tokenizer():
    """The demo model's tokenizer with a special end token whose name is plain text, too."""
    loaded = mlx_lm.load(str(demo_model_path()))[1]
    inner = copy.deepcopy(loaded._tokenizer)
    inner.add_special_tokens({"additional_special_tokens": [END]})
    return TokenizerWrapper(inner, eos_token_ids=[*loaded.eos_token_ids, inner.encode(END)[-1]])


@pytest.mark.parametrize(
    "schema",
    [
        {"const": f"x {END} y"},
        {"enum": [f"{END}a", f"{END}b"]},
        {"enum": [f"{END}é", f"{END}è"]},  # what is forced ends within a character
        {"const": END},
    ],
    ids=str,
)
def test_forced_text_may_have_the_name_of_a_special_token(schema):
    tokenizer = chat_tokenizer()
    grammars = Grammars(tokenizer, None)
    state = grammars.start(SamplingParams(json_schema=schema), 0)
    forced = list(state.forced)
    tokens = grammars._tokens
    end = forced.pop() if forced[-1] == tokens.eos_token else None
    assert not any(map(tokens.is_special_token, forced))
    text = tokens.decode_str(forced)
    assert (END in text and '"x <|im_end|> y""<|im_end|>"'.find(text) >= 0) or end is None
    if "const" in schema:
        assert text == json.dumps(schema["const"]) and end is not None


def test_a_space_at_the_beginning_stays_if_the_grammar_demands_it():
    model, tokenizer = mlx_lm.load(str(demo_model_path()))[:2]
    engine = Engine(model, tokenizer, num_blocks=64)
    for regex in (" x", "  y z", "x"):
        assert engine.generate(["def f():"], max_tokens=20, regex=regex)[0].text == regex
