"""A prompt with images is a value: tokens, images, and the keys on which its K/V depends."""

import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged.engine.text import PromptEncoder
from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.prompt import Prompt
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.host import image_processor
from mlx_paged.vision.image_spans import ImageSpans, Picture

TOKENS = [5, 9, 9, 7]
IMAGE = Picture(bytes(range(32)), np.array([9, 9], np.int32), np.arange(2), {"pixels": np.ones(6)})


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(TOKENS, ImageSpans(TOKENS, [IMAGE], np.array([False, True, True, False])))


def test_keys_are_tokens_but_where_an_image_is(prompt):
    assert Prompt(TOKENS).keys == TOKENS and Prompt(TOKENS).is_plain
    keys = prompt.keys
    assert (keys[0], keys[3]) == (5, 7) and min(keys[1:3]) > 2**61 and keys[1] != keys[2]
    assert not prompt.is_plain and (prompt.nbytes, Prompt(TOKENS).nbytes) == (48, 0)


def test_a_prompt_is_a_sequence_of_its_tokens(prompt):
    assert (len(prompt), prompt[1], prompt[1:3], [*prompt]) == (4, 9, [9, 9], TOKENS)
    assert prompt == TOKENS and prompt == prompt and prompt != Prompt(TOKENS)
    assert Prompt(TOKENS) == Prompt([*TOKENS]) != Prompt(TOKENS[1:])


def test_a_request_that_goes_on_after_a_prompt_keeps_its_images(prompt):
    request = Request(0, [*prompt], SamplingParams(), 0, prompt=prompt)
    request.tokens += [3, 4]
    assert request.keys == [*prompt.keys, 3, 4]
    child = request.prompt_of([*request.tokens, 6])
    assert child.image_spans is prompt.image_spans and child.tokens == [*TOKENS, 3, 4, 6]
    plain = Request(1, TOKENS, SamplingParams(), 0)
    assert plain.keys is plain.tokens and plain.prompt_of([1]) == Prompt([1])


def test_an_encoder_gives_values_and_refuses_a_suffix_with_images(prompt):
    encode = PromptEncoder(None, TokenIds(20, 20, None))
    assert encode(prompt) is prompt
    assert type(encode(np.array(TOKENS))) is Prompt and encode(TOKENS) == Prompt(TOKENS)
    with pytest.raises(ValueError, match="suffix has images"):
        encode(prompt, continues=True)
    assert encode([], continues=True) == Prompt([])


def test_a_model_of_text_has_no_image_processor():
    model = nn.Linear(2, 2)
    model.processor = model.eyes = print
    assert image_processor(model) is None


def test_an_empty_prompt_is_refused_by_name_unless_it_continues():
    encode = PromptEncoder(None, TokenIds(100, 100, ()))
    with pytest.raises(ValueError, match=r"\[add_request\] prompt is empty"):
        encode(Prompt([]))
    assert encode(Prompt([]), continues=True) == []
