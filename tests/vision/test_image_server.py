"""The server with a model that sees: OpenAI's and Anthropic's clients, and what is refused."""

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import anthropic
import openai
import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: pip install '.[vision]'")

from mlx_vlm import load, stream_generate
from PIL import Image

from mlx_paged.generate.__main__ import main
from mlx_paged.protocol.images import LEFT_OUT
from mlx_paged.server import loaded_model
from mlx_paged.server.app import NUM_DECODERS, NUM_THREADS
from mlx_paged.vision.prompts import ImageProcessor
from tests.support import TIMEOUT
from tests.support.commands.server_harness import client, live, only_model, post, wait_until
from tests.support.models import seeing_directory as tiny

ASK = "what is this?"
PATIENCE_S = 100
TEXT = f"user:{tiny.PLACE}{ASK}\nassistant:"
MODEL = "default_model"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def alone(directory):
    """What mlx-vlm answers to a text with images."""
    model, processor = load(str(directory))

    def answer(text, *images):
        opened = [Image.open(BytesIO(image)).convert("RGB") for image in images]
        options = {"image": opened, "max_tokens": 8, "temperature": 0.0}
        tokens = [each.token for each in stream_generate(model, processor, text, **options)][:8]
        return processor.tokenizer.decode(tokens, skip_special_tokens=False)

    return answer


@pytest.fixture(scope="module")
def server(directory):
    with live("--model", str(directory), "--vision") as running:
        yield running


def encoded(image):
    return base64.b64encode(image).decode()


def url(image, kind="png"):
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind};base64,{encoded(image)}"},
    }


def chat(server, *parts):
    messages = [{"role": "user", "content": [*parts]}]
    return client(server).chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0
    )


def said(text):
    return {"type": "text", "text": text}


def test_a_chat_with_an_image_is_answered_as_by_mlx_vlm(server, alone):
    done = chat(server, url(tiny.png(1)), said(ASK))
    assert done.choices[0].message.content == alone(TEXT, tiny.png(1))
    again = chat(server, url(tiny.png(1)), said(ASK))
    assert again.choices[0].message.content == done.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 16
    two = f"user:{tiny.PLACE}or{tiny.PLACE}{ASK}\nassistant:"
    done = chat(server, url(tiny.png(1)), said("or"), url(tiny.png(2, 64, 32)), said(ASK))
    assert done.choices[0].message.content == alone(two, tiny.png(1), tiny.png(2, 64, 32))


def test_anthropics_messages_take_images(server, alone):
    made = anthropic.Anthropic(base_url=str(client(server).base_url)[:-4], api_key="none")
    source = {"type": "base64", "media_type": "image/png", "data": encoded(tiny.png(3))}
    parts = [{"type": "image", "source": source}, said(ASK)]
    done = made.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[{"role": "user", "content": parts}],
        extra_body={"temperature": 0},
    )
    assert "".join(part.text for part in done.content) == alone(TEXT, tiny.png(3))


def test_responses_take_images(server, alone):
    image = {"type": "input_image", "image_url": url(tiny.png(5))["image_url"]["url"]}
    parts = [image, {"type": "input_text", "text": ASK}]
    asked = [{"role": "user", "content": parts}]
    done = client(server).responses.create(
        model=MODEL, input=asked, max_output_tokens=16, temperature=0
    )
    assert done.output_text.startswith(alone(TEXT, tiny.png(5)))


def seen_in_a_result(server, api, image):
    """The answer to a chat whose last turn is a tool's result of a text and an image."""
    link = f"data:image/png;base64,{encoded(image)}"
    if api == "chat":
        function = {"name": "f", "arguments": "{}"}
        calls = [{"id": "1", "type": "function", "function": function}]
        content = [said("saw "), {"type": "image_url", "image_url": {"url": link}}]
        chat = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": content},
        ]
        body = {"messages": chat, "max_tokens": 8, "temperature": 0}
        return post(server, body, "/v1/chat/completions")[2]["choices"][0]["message"]["content"]
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
        content = [said("saw "), {"type": "image", "source": source}]
        chat = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}],
            },
        ]
        body = {"messages": chat, "max_tokens": 8, "temperature": 0}
        return post(server, body, "/v1/messages")[2]["content"][0]["text"]
    output = [{"type": "input_text", "text": "saw "}, {"type": "input_image", "image_url": link}]
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    body = {"input": items, "max_output_tokens": 8, "temperature": 0}
    return post(server, body, "/v1/responses")[2]["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_a_picture_in_a_result_is_seen(server, alone, api):
    text = f"user:go\nassistant:\ntool:saw {tiny.PLACE}\nassistant:"
    assert seen_in_a_result(server, api, tiny.png(6)) == alone(text, tiny.png(6))


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_a_template_that_shows_no_picture_of_a_result_gets_a_sentence(tmp_path, api):
    blind = tiny.TEMPLATE.replace(
        "part.type == 'image'", "part.type == 'image' and m.role == 'user'"
    )
    text = f"user:go\nassistant:\ntool:saw {LEFT_OUT}\nassistant:"
    with live("--model", str(tiny.make(tmp_path / "m", blind)), "--vision") as own:
        raw = {"prompt": text, "max_tokens": 8, "temperature": 0}
        expected = post(own, raw)[2]["choices"][0]["text"]
        assert seen_in_a_result(own, api, tiny.png(6)).lstrip() == expected.lstrip()


BROKEN = tiny.png(1)[:80]
LARGE = BytesIO()
Image.new("1", (10_000, 10_000)).save(LARGE, "PNG")
REFUSED = {
    "network": {"type": "image_url", "image_url": {"url": "http://localhost:1/a.png"}},
    "file": {"type": "image_url", "image_url": {"url": "file:///etc/hosts"}},
    "broken": url(BROKEN),
    "wrong type": url(b"%PDF-1.4", "png"),
    "large": url(LARGE.getvalue()),
    "no image": {"type": "image_url"},
}


@pytest.mark.parametrize("part", REFUSED.values(), ids=REFUSED)
def test_other_images_are_refused(server, part):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(server, part, said(ASK))
    assert "expected" in str(refusal.value)


def test_many_pixels_in_many_images_are_refused(server):
    with pytest.raises(openai.BadRequestError, match=r"images\[2\]: 4000 x 4000 pixels"):
        file = BytesIO()
        Image.new("1", (4000, 4000)).save(file, "PNG")
        chat(server, *[url(file.getvalue())] * 9, said(ASK))


def test_too_many_images_are_refused(server):
    with pytest.raises(openai.BadRequestError, match="images: 65: expected at most 64"):
        chat(server, *[url(tiny.png(1))] * 65, said(ASK))


@pytest.mark.parametrize(
    "text", ["<|placeholder|>", "<|image_pad|>", "<|vision_start|><|video_pad|>", "a <|im_end|> b"]
)
def test_text_that_names_more_places_is_text(server, text):
    """No feature stands for these places. The prompts differ by the bytes of the text."""
    used = [
        chat(server, url(tiny.png(1)), said(each)).usage.prompt_tokens
        for each in (text, "x" * len(text))
    ]
    assert used[0] == used[1]


def test_a_text_that_is_too_long_is_refused_before_an_image_is_decoded(server, monkeypatch):
    model = only_model(server)
    monkeypatch.setattr(ImageProcessor, "__call__", lambda *_: pytest.fail("decoded"))
    text = "a" * model.max_context
    assert len(text) < model.max_context * model.longest_token
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(server, url(tiny.png(1)), said(text))


def asked(server, *parts):
    body = {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 8}
    return post(server, body, "/v1/chat/completions")


def test_images_that_are_decoded_do_not_keep_others_waiting(server, monkeypatch):
    """More requests with images than the server has threads for small ones."""
    may_go_on, under_way = threading.Event(), []

    def decoded(self, text, images, read=ImageProcessor.__call__):
        under_way.append(text)
        assert may_go_on.wait(TIMEOUT)
        return read(self, text, images)

    monkeypatch.setattr(ImageProcessor, "__call__", decoded)
    with ThreadPoolExecutor(NUM_THREADS + 9) as clients:
        try:
            waiting = [
                clients.submit(asked, server, url(tiny.png(100 + i)), said(ASK))
                for i in range(NUM_THREADS + 8)
            ]
            wait_until(lambda: only_model(server).taken >= NUM_THREADS)
            assert clients.submit(asked, server, said(ASK)).result(PATIENCE_S)[0] == 200
            assert len(under_way) == NUM_DECODERS and not any(each.done() for each in waiting)
        finally:
            may_go_on.set()
        assert {each.result()[0] for each in waiting} == {200}


def test_threads_that_decode_images_end_with_the_server(directory):
    before = set(threading.enumerate())
    with live("--model", str(directory), "--vision") as server:
        chat(server, url(tiny.png(1)), said(ASK))
        decoders = server.app.state.images
    with pytest.raises(RuntimeError, match="after shutdown"):
        decoders.submit(print)
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_bytes_of_images_that_requests_hold_are_bounded(server, monkeypatch):
    sizes, model = [], only_model(server)

    def holding(self, size, own=loaded_model.Model.holding):
        sizes.append(size)
        return own(self, size)

    with monkeypatch.context() as patched:
        patched.setattr(loaded_model.Model, "holding", holding)
        assert asked(server, url(tiny.png(1)), said(ASK))[0] == 200
    (held,) = sizes
    assert held == 6 * 4 * (3 * 2 * 8 * 8) * 4 + 3 * 8  # patches in float32, the grid
    monkeypatch.setattr(loaded_model, "MAX_HELD", 2 * held - 1)
    wait_until(lambda: not model.taken)
    with model.holding(held):
        status, headers, body = asked(server, url(tiny.png(2)), said(ASK))
        assert status == 503 and headers["Retry-After"] == "1"
        assert "images are held for others" in body["error"]["message"]
        assert body["error"]["code"] == "overloaded"
        assert asked(server, said(ASK))[0] == 200
    monkeypatch.setattr(loaded_model, "MAX_HELD", 1)
    assert asked(server, url(tiny.png(2)), said(ASK))[0] == 200
    wait_until(lambda: not model.taken)
    assert model.held == 0


def test_a_model_that_sees_nothing_refuses_images():
    with live() as server, pytest.raises(openai.BadRequestError, match="no images"):
        chat(server, url(tiny.png(1)), said(ASK))


def test_generate_takes_images(directory, alone, tmp_path, capsys):
    image = tmp_path / "a.png"
    image.write_bytes(tiny.png(4))
    flags = ["--model", str(directory), "--vision", "--max-tokens", "8", "--no-prewarm"]
    assert main([*flags, "--prompt", ASK, "--image", str(image)]) == 0
    assert alone(TEXT, tiny.png(4)).strip() in capsys.readouterr().out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "{ASK}", "images": ["{image}"]}}\n')
    assert main([*flags, "--prompts-file", str(prompts)]) == 0
    assert alone(TEXT, tiny.png(4)).strip() in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--prompt", ASK, "--image", str(image)])
    assert "expected --prompt and --vision" in capsys.readouterr().err


def test_the_tower_runs_once_for_an_image_that_is_asked_about_again(server):
    model = only_model(server)
    pictures = model.service.call(lambda engine: engine.runner.model.pictures)
    before = pictures.num_encoded
    for i in range(4):
        chat(server, url(tiny.png(9)), said(f"{i}?"))
    assert pictures.num_encoded == before + 1
