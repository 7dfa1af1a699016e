"""Chats of models that see have the tokens that mlx-vlm makes of them."""

import base64
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: pip install '.[vision]'")

import transformers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_vlm.models.gemma3.processing_gemma3 import Gemma3Processor
from mlx_vlm.models.idefics3.processing_idefics3 import Idefics3Processor
from mlx_vlm.models.pixtral.processing_pixtral import PixtralImageProcessor, PixtralProcessor
from mlx_vlm.prompt_utils import apply_chat_template
from mlx_vlm.utils import prepare_inputs, should_add_special_tokens
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from mlx_paged.chat.rendering import rendered
from mlx_paged.formats import choice
from mlx_paged.protocol.prompts import encode
from mlx_paged.protocol.request_body import read
from mlx_paged.protocol.templates import tried
from mlx_paged.vision.prompts import ImageProcessor
from tests.support.models import seeing_directory as tiny

BOS = "<bos>"
NAMES = ["<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<end_of_image>"]
EDGE = {"longest_edge": 32}


def pixtral(tokenizer, template):
    images = PixtralImageProcessor(size=EDGE, patch_size=8)
    return PixtralProcessor(images, tokenizer, patch_size=8, chat_template=template)


def idefics3(tokenizer, template):
    images = transformers.Idefics3ImageProcessor(size=EDGE, max_image_size=EDGE)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def gemma3(tokenizer, template):
    images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


KINDS = {
    "pixtral": (pixtral, "[IMG]", "[IMG]"),
    "idefics3": (idefics3, "<image>", "<image>"),
    "gemma3": (gemma3, "<start_of_image>", "<image>"),
}
"""How a processor is made, its place of an image in a text, and the token of its features."""


def made(name, template):
    """A processor whose tokenizer begins each text with a token, as its template does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, "<eos>", *NAMES])
    first = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = TemplateProcessing(f"{BOS} $A", special_tokens=first)
    own = {"image_token": NAMES[0], "boi_token": NAMES[4], "eoi_token": NAMES[5]}
    ends = {"bos_token": BOS, "eos_token": "<eos>", "pad_token": "<eos>"}
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, extra_special_tokens=own, **ends
    )
    return KINDS[name][0](wrapped, template)


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_chat_has_the_tokens_of_mlx_vlm(name, num_images):
    _, place, token = KINDS[name]
    template = "{{ bos_token }}" + tiny.TEMPLATE.replace(tiny.PLACE, place)
    processor = made(name, template)
    files = [tiny.png(i) for i in range(num_images)]
    sent = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        for encoded in (base64.b64encode(file).decode() for file in files)
    ]
    content = [*sent, {"type": "text", "text": "what?"}]

    opened = [Image.open(BytesIO(file)).convert("RGB") for file in files]
    parts = [{"type": "image"}] * num_images + content[-1:]
    text = apply_chat_template(
        processor, {"model_type": name}, [{"role": "user", "content": parts}], num_images=num_images
    )
    special = should_add_special_tokens(name, processor)
    given = {"images": opened or None, "prompts": text, "add_special_tokens": special}
    expected = np.array(prepare_inputs(processor, **given)["input_ids"]).reshape(-1).tolist()

    tokenizer = TokenizerWrapper(processor.tokenizer)
    (token_id,) = tokenizer.encode(token, add_special_tokens=False)
    config = SimpleNamespace(model_type=name, image_token_id=token_id)
    vlm = SimpleNamespace(config=config, language_model=None)
    model = SimpleNamespace(
        tokenizer=tokenizer,
        format=choice.chosen(tokenizer).format,
        image_processor=ImageProcessor(vlm, processor),
        abilities=tried(tokenizer),
        max_context=1000,
        longest_token=20,
        has_states=False,
    )
    body = {"messages": [{"role": "user", "content": content}]}
    (prompt,) = encode(model, read(body, True, 1)[0], {})
    assert prompt.tokens == expected
    assert expected.count(token_id) >= 4 * num_images


@pytest.mark.parametrize("name", KINDS)
def test_places_that_a_text_names_are_text(name):
    """The prompt has the tokens of one whose text is longer by the bytes of these names."""
    _, place, token = KINDS[name]
    processor = made(name, "{{ bos_token }}" + tiny.TEMPLATE.replace(tiny.PLACE, place))
    tokenizer = TokenizerWrapper(processor.tokenizer)
    (token_id,) = tokenizer.encode(token, add_special_tokens=False)
    vlm = SimpleNamespace(
        config=SimpleNamespace(model_type=name, image_token_id=token_id), language_model=None
    )
    eyes, image = ImageProcessor(vlm, processor), [tiny.png(1)]
    found = []
    for text in (f"a{place}{token}{BOS}b", f"a{'x' * len(place + token + BOS)}b"):
        content = [{"type": "image"}, {"type": "text", "text": text}]
        prompt = rendered(tokenizer, [{"role": "user", "content": content}])
        found.append((text, eyes(prompt, image)))
    (text, named), (other, plain) = found
    ids = tokenizer.encode(other, add_special_tokens=False)
    at = next(i for i in range(len(plain)) if list(plain[i : i + len(ids)]) == ids)
    assert [*named[:at], *named[at + len(ids) :]] == [*plain[:at], *plain[at + len(ids) :]]
    assert tokenizer.decode(named[at : at + len(ids)]) == text
    assert named.count(token_id) == plain.count(token_id) > 0
