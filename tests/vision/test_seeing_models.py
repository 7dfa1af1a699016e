"""Models of mlx-vlm in a batch answer as mlx-vlm does with one prompt at a time."""

import re
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import Engine, UnsupportedModelError

mlx_vlm = pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: pip install '.[vision]'")

from mlx_paged.vision.host import REASONS, SEEING, SeeingModel
from mlx_paged.vision.image_spans import Picture
from tests.support.models import seeing_models as tiny

MAX_TOKENS = 6
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "vision.md"


def mixed(model: nn.Module, name: str) -> list[list[int]]:
    """16 prompts: of text, with an image, and with two."""
    prompts: list[list[int]] = []
    for i in range(16):
        text, image = tiny.words(i, 3 + 2 * i % 11), tiny.picture(name, i)
        if i % 4 == 0:
            prompts.append(text)
        elif i % 4 == 3:
            more = tiny.words(50 + i, 2), tiny.picture(name, 100 + i), tiny.words(90 + i, i)
            prompts.append(tiny.prompt(model, name, text, image, *more))
        else:
            prompts.append(tiny.prompt(model, name, text, image, tiny.words(30 + i, 3 + i)))
    return prompts


def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [done.tokens for done in engine.generate(prompts, max_tokens=MAX_TOKENS)]


def make(model: nn.Module, **options: object) -> Engine:
    sizes = {"num_blocks": 200, "block_size": 8, "prefill_chunk": 24, "compile": False}
    return Engine(model, **(sizes | options))  # type: ignore[arg-type]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", tiny.KINDS)
def test_sixteen_requests_answer_as_each_alone(name):
    model = tiny.build(name)
    prompts = mixed(model, name)
    expected = [tiny.alone(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) > 8
    engine = make(model)
    assert answers(engine, prompts) == expected
    assert f"| {name} | {engine.manager.profile.batching} |" in DOCUMENT.read_text()


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_an_engine_that_may_compile_decodes_answers_the_same(name):
    """Models that read a length on the host cannot be traced."""
    model = tiny.build(name)
    prompts = mixed(model, name)[:4]
    engine = make(model, compile=True)
    reason = None if name == "qwen3_vl" else "MLX cannot trace a step"
    assert engine.runner.why_plain == reason
    assert answers(engine, prompts) == [tiny.alone(model, each, MAX_TOKENS) for each in prompts]


def test_every_architecture_that_is_served_is_tried_here():
    assert {name.split()[0] for name in tiny.KINDS} == SEEING


def test_the_document_tells_of_every_architecture_that_sees():
    """Those with a configuration of a tower that give embeddings to a model of text."""
    root = Path(mlx_vlm.__file__).parent / "models"
    files = [file for file in root.glob("*/*.py") if "def get_input_embeddings" in file.read_text()]
    known = {file.parent.name for file in files if "ision" in file.read_text()}
    document = DOCUMENT.read_text()
    tables = document[document.index("## Architectures") :]
    named = set(re.findall(r"\w+", tables))
    assert known - named == set()
    for reason, kinds in REASONS.items():
        assert f"| {', '.join(kinds)} | {reason} |" in tables
        assert not SEEING & set(kinds)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_preempted_requests_answer_the_same(name):
    model = tiny.build(name)
    prompts = mixed(model, name)[:6]
    expected = [tiny.alone(model, prompt, 20) for prompt in prompts]
    engine = make(model, num_blocks=10, prefix_cache=False)
    assert [done.tokens for done in engine.generate(prompts, max_tokens=20)] == expected
    assert engine.stats.preemptions > 0


def test_features_that_are_not_kept_are_computed_again(monkeypatch):
    model = tiny.build("qwen2_vl")
    prompts = [
        tiny.prompt(model, "qwen2_vl", tiny.picture("qwen2_vl", seed), tiny.words(seed, 30))
        for seed in (1, 2, 1, 2)
    ]
    expected = [tiny.alone(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = make(model, prefix_cache=False, max_running=1)
    pictures = engine.runner.model.pictures
    monkeypatch.setattr(pictures._kept, "_max_bytes", 1)
    assert answers(engine, prompts) == expected
    last = pictures.of(prompts[-1].image_spans.pictures[0])
    assert pictures.num_encoded == 4 and pictures.nbytes == last.embeddings.nbytes


def test_samples_forks_and_beams_see_the_image():
    model = tiny.build("qwen2_vl")
    prompt = tiny.prompt(model, "qwen2_vl", [5], tiny.picture("qwen2_vl", 1), tiny.words(1, 9))
    expected = tiny.alone(model, prompt, MAX_TOKENS)
    engine = make(model)
    (samples,) = engine.sample([prompt], 2, max_tokens=MAX_TOKENS, temperature=0.0, best_of=None)
    assert [done.tokens for done in samples] == [expected] * 2
    assert engine.beam_search(prompt, 1, max_tokens=MAX_TOKENS).tokens == expected
    parent = engine.add_request(prompt, max_tokens=3, keep=True)
    while engine.has_work:
        engine.step()
    child = engine.fork(parent, max_tokens=MAX_TOKENS - 3, temperature=0.0)
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step() if output.request_id == child]
    assert tokens == expected[3:]


def beams_alone(model, prompt, num_beams, length):
    """The likeliest continuations by a beam search of mlx-vlm's log-probabilities, without ends."""
    found = [(0.0, [])]
    for _ in range(length):
        more = []
        for total, tokens in found:
            scores = tiny.next_logprobs(model, prompt, tokens)
            more += [(total + score, [*tokens, i]) for i, score in enumerate(scores.tolist())]
        found = sorted(more, reverse=True)[:num_beams]
    return found


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "gemma4"])
def test_a_beam_search_sees_the_image(name):
    model = tiny.build(name)
    prompt = tiny.prompt(model, name, [5], tiny.picture(name, 1), tiny.words(1, 9))
    expected = beams_alone(model, prompt, 3, 4)
    found = make(model).beam_search(prompt, 3, max_tokens=4).beams
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    sums = [sum(beam.logprobs) for beam in found]
    assert np.allclose(sums, [total for total, _ in expected], atol=1e-4)


def test_speculation_and_quantized_keys_take_image_prompts():
    model = tiny.build("qwen2_vl")
    prompts = mixed(model, "qwen2_vl")[:4]
    expected = [tiny.alone(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert answers(make(model, speculate="ngram"), prompts) == expected
    quantized = answers(make(model, kv_bits=8), prompts)
    assert [len(tokens) for tokens in quantized] == [MAX_TOKENS] * 4


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_5"])
def test_an_image_is_a_part_of_the_prefix(name):
    model = tiny.build(name)
    text = tiny.words(1, 4), tiny.words(2, 12)
    same = [
        tiny.prompt(model, name, text[0], tiny.picture(name, 1), text[1], tiny.words(9 + i, 3))
        for i in range(8)
    ]
    sizes = {len(tiny.picture(name, seed).rows): seed for seed in range(2, 40)}
    seed = sizes[len(tiny.picture(name, 1).rows)]
    other = tiny.prompt(model, name, text[0], tiny.picture(name, seed), text[1], [7, 8, 9])
    assert list(other)[:-3] == list(same[0])[:-3]
    expected = [tiny.alone(model, prompt, MAX_TOKENS) for prompt in (*same, other)]
    engine = make(model)
    first = answers(engine, same[:1])
    later = engine.generate(same[1:], max_tokens=MAX_TOKENS)
    assert [*first, *(done.tokens for done in later)] == expected[:8]
    assert engine.runner.model.pictures.num_encoded == 1
    if not engine.manager.profile.states.exist:  # else up to a snapshot
        assert min(done.cached_prompt_tokens for done in later) >= len(same[0]) - 3 - 8
    (done,) = engine.generate([other], max_tokens=MAX_TOKENS)
    assert done.tokens == expected[8] and done.cached_prompt_tokens <= len(text[0]) + 1
    assert engine.runner.model.pictures.num_encoded == 2


def test_keys_outlive_the_process_on_disk(tmp_path):
    model = tiny.build("llava")
    picture = tiny.picture("llava", 1)
    prompt = tiny.prompt(model, "llava", tiny.words(1, 4), picture, tiny.words(2, 12))
    expected = tiny.alone(model, prompt, MAX_TOKENS)
    first = make(model, kv_disk=tmp_path)
    assert answers(first, [prompt]) == [expected]
    first.close()
    del first
    second = make(model, kv_disk=tmp_path)
    (done,) = second.generate([prompt], max_tokens=MAX_TOKENS)
    assert done.tokens == expected and done.cached_prompt_tokens >= 16
    second.close()


def test_parts_and_unknown_models_are_refused_when_the_engine_is_made():
    model = tiny.build("llava")
    with pytest.raises(ValueError, match=r"is a part of a model: expected the first value"):
        make(model.language_model)
    stranger = type("Model", (nn.Module,), {"__module__": "mlx_vlm.models.mllama.mllama"})()
    stranger.layers, stranger.language_model = [], nn.Module()
    stranger.language_model.config = None
    stranger.get_input_embeddings = None
    with pytest.raises(UnsupportedModelError, match="mllama of mlx-vlm is refused: its images"):
        make(stranger)


@pytest.mark.parametrize("name", ["pixtral", "qwen3_vl"])
def test_in_half_precision_text_is_answered_as_without_images_beside(name, monkeypatch):
    given, read = [], SeeingModel.arguments

    def arguments(self, batch):
        given.append(read(self, batch))
        return given[-1]

    monkeypatch.setattr(SeeingModel, "arguments", arguments)
    model = tiny.build(name)
    model.apply(lambda a: a.astype(mx.bfloat16) if mx.issubdtype(a.dtype, mx.floating) else a)
    prompts = mixed(model, name)
    texts = prompts[::4]
    together = answers(make(model), prompts)
    dtypes = {each["inputs_embeds"].dtype for each in given if "inputs_embeds" in each}
    assert dtypes == {mx.bfloat16}
    assert together[::4] == answers(make(model), texts)
    assert together == [answers(make(model), [prompt])[0] for prompt in prompts]


def test_a_processor_may_name_the_token_of_images():
    model = tiny.build("internvl_chat")
    image = tiny.picture("internvl_chat", 1)
    tokens = np.where(image.tokens == tiny.IMAGE, 119, image.tokens).astype(np.int32)
    inputs = image.inputs | {"image_token_index": np.array(119)}
    named = Picture(image.digest, tokens, image.rows, inputs)
    plain = tiny.prompt(model, "internvl_chat", image, tiny.words(1, 5))
    prompt = tiny.prompt(model, "internvl_chat", named, tiny.words(1, 5))
    assert prompt.image_spans.keys == plain.image_spans.keys
    assert answers(make(model), [prompt]) == answers(make(model), [plain])


def test_images_need_a_processor():
    with pytest.raises(ValueError, match="expected a model and a processor of mlx-vlm"):
        make(tiny.build("llava")).with_images("text", [b""])
