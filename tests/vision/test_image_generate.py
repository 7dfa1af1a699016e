"""The command with images: where they may be given, and which are refused."""

import json

import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: pip install '.[vision]'")

from mlx_vlm import load, stream_generate
from PIL import Image

from mlx_paged.generate.__main__ import main
from mlx_paged.generate.prompts_file import read_prompts
from tests.support.models import seeing_directory as tiny

ASK, PLACE = "what is this?", tiny.PLACE


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("models") / "tiny", tiny.ONLY_PARTS)


@pytest.fixture(scope="module")
def files(directory):
    paths = [str(directory / f"{seed}.png") for seed in (1, 2)]
    for seed, path in enumerate(paths, start=1):
        with open(path, "wb") as file:
            file.write(tiny.png(seed))
    return paths


@pytest.fixture(scope="module")
def alone(directory):
    """What mlx-vlm answers to a text with images."""
    model, processor = load(str(directory))

    def answer(text, *paths):
        given = [Image.open(path).convert("RGB") for path in paths]
        options = {"image": given or None, "max_tokens": 8, "temperature": 0.0}
        tokens = [each.token for each in stream_generate(model, processor, text, **options)][:8]
        return processor.tokenizer.decode(tokens, skip_special_tokens=False)

    return answer


@pytest.fixture
def answer(directory, tmp_path, capsys):
    """What the command answers with these flags, or to a line of a prompts file."""

    def run(*flags, line=None):
        prompts = tmp_path / "prompts.jsonl"
        if line is not None:
            prompts.write_text(json.dumps(line))
            flags = (*flags, "--prompts-file", str(prompts))
        own = ["--model", str(directory), "--vision", "--max-tokens", "8", "--no-prewarm"]
        assert main([*own, *flags]) == 0
        return capsys.readouterr().out

    return run


def test_a_text_that_the_template_would_lose_becomes_a_part(answer, alone):
    assert alone(f"user:{ASK}\nassistant:").strip() in answer("--prompt", ASK)


def test_the_flag_may_be_repeated(answer, alone, files):
    expected = alone(f"user:{PLACE}{PLACE}{ASK}\nassistant:", *files).strip()
    first, second = files
    assert expected in answer("--prompt", ASK, "--image", first, "--image", second)
    assert expected in answer("--prompt", ASK, "--image", first, second)


def test_the_images_of_a_chat_are_where_it_says_or_before_its_last_message(answer, alone, files):
    image, text = {"type": "image"}, {"type": "text", "text": ASK}
    said = {"role": "assistant", "content": "yes"}
    chat = [{"role": "user", "content": [text, image]}, said, {"role": "user", "content": [image]}]
    expected = alone(f"user:{ASK}{PLACE}\nassistant:yes\nuser:{PLACE}\nassistant:", *files)
    assert expected.strip() in answer(line={"messages": chat, "images": files})
    expected = alone(f"user:{PLACE}{PLACE}{ASK}\nassistant:", *files).strip()
    chat = [{"role": "user", "content": [text]}]
    assert expected in answer(line={"messages": chat, "images": files})


IMAGE, URL = {"type": "image"}, {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("role", "content", "images", "message"),
    [
        ("user", [IMAGE, IMAGE], ["a"], "has 2 places: expected one for each"),
        ("user", [IMAGE], [], "has 1 places: expected one for each"),
        ("user", [URL], ["a"], 'expected {"type": "image"}'),
        ("assistant", [IMAGE], ["a"], 'in no message of the role "user"'),
        ("assistant", "text", ["a"], 'in no message of the role "user"'),
    ],
)
def test_images_that_have_no_place_are_refused(role, content, images, message):
    line = {"messages": [{"role": role, "content": content}], "images": images}
    with pytest.raises(ValueError, match=r"p\.jsonl line 1: ") as refusal:
        read_prompts([json.dumps(line)], "p.jsonl")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "flags", [["--vision", "--prompts-file", "FILE"], ["--prompt", "a"], ["--vision"]]
)
def test_images_without_a_prompt_or_a_model_that_sees_are_refused(flags, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    flags = [str(prompts) if flag == "FILE" else flag for flag in flags]
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--image", "absent.png"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "--image is given: expected --prompt and --vision beside it" in line
