"""Requests name adapters of flags and of one folder, and nothing else on the disk."""

import json

import mlx.core as mx
import pytest

from mlx_paged.loading import load_model
from mlx_paged.server.flags import parse
from tests.support.commands.server_harness import CODE, exchange, live, post
from tests.support.models.adapters import greedy, random_arrays, with_adapter, write_adapter

KEY = {"Authorization": "Bearer k"}.items()
TOKENS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of adapters with links to another folder, which has one, too."""
    top = tmp_path_factory.mktemp("all")
    for seed, place in enumerate(("dir/one", "dir/team/two", "outside/three")):
        write_adapter(top / place, random_arrays(load_model()[0], seed))
    (top / "dir/link").symlink_to(top / "outside/three")
    (top / "dir/files").mkdir()
    for name in ("adapter_config.json", "adapters.safetensors"):
        (top / "dir/files" / name).symlink_to(top / "outside/three" / name)
    (top / "dir/loop").symlink_to(top / "dir/loop")
    (top / "dir/empty").mkdir()
    return top


@pytest.fixture(scope="module")
def server(root):
    flags = ("--adapters-dir", str(root / "dir"), "--adapter", f"three={root / 'outside/three'}")
    with live(*flags, "--served-model-name", "base", "--api-key", "k") as running:
        yield running


def ask(server, **body):
    own = {"prompt": CODE, "max_tokens": TOKENS, "temperature": 0} | body
    status, _, content = post(server, own, headers=KEY)
    return content["choices"][0]["text"] if status == 200 else (status, content["error"])


def expected(folder=None):
    model, tokenizer = load_model()
    prompt = tokenizer.encode(CODE)
    tokens = greedy(with_adapter(model, folder), prompt, TOKENS)
    text = tokenizer.decode([t for t in prompt + tokens if t not in tokenizer.eos_token_ids])
    return text.removeprefix(CODE)


def test_requests_have_the_adapters_that_they_name(server, root):
    three, one = expected(root / "outside/three"), expected(root / "dir/one")
    two, base = expected(root / "dir/team/two"), expected()
    assert len({one, two, three, base}) == 4
    assert ask(server, adapters="three") == three
    assert ask(server, model="three") == ask(server, model="base:three") == three
    assert ask(server, adapters="one") == ask(server, adapters="./team/../one") == one
    assert ask(server, adapters="team/two") == ask(server, model="team/two") == two
    for body in ({}, {"adapters": None}, {"adapters": "default_model"}, {"model": "base"}):
        assert ask(server, **body) == base
    listed = json.loads(exchange(server, "GET", "/v1/models", headers=KEY)[2])["data"]
    own = {each["id"]: (each.get("root"), each.get("parent")) for each in listed}
    assert own == {
        "base": (None, None),
        "three": ("three", "base"),
        "one": ("one", "base"),
        "team/two": ("team/two", "base"),
    }
    single = json.loads(exchange(server, "GET", "/v1/models/team/two", headers=KEY)[2])
    assert single["parent"] == "base"


PLACES = [
    *("..", "../outside/three", "link", "files", "loop", "empty", ".", "", "no", "one/.."),
    *("one\0", "x" * 5000, "/etc", "one/adapter_config.json", "../dir", "\ud800"),
]


def test_an_estimate_counts_the_cached_tokens_of_the_adapter(server):
    def cached(**body):
        status, _, content = post(server, {"prompt": prompt} | body, "/v1/estimate", headers=KEY)
        return content["cached_tokens"] if status == 200 else (status, content["error"]["param"])

    prompt = [9] * 49
    ask(server, prompt=prompt, adapters="one")
    assert (cached(adapters="one"), cached(model="one"), cached()) == (48, 48, 0)
    assert cached(adapters="three") == 0
    assert cached(adapters="nowhere") == (404, "adapters")


@pytest.mark.parametrize("given", PLACES)
def test_nothing_outside_the_folder_is_used(server, root, given):
    answers = [ask(server, adapters=given), ask(server, adapters=str(root / "outside" / given))]
    for answer in answers:
        status, error = answer
        assert status in (400, 404), error
    assert str(root) not in answers[0][1]["message"]
    body = {"lora_name": "x", "lora_path": given}
    assert post(server, body, "/v1/load_lora_adapter", KEY)[0] in (400, 404)
    assert ask(server) == expected()


def test_adapters_are_loaded_and_unloaded(server, root):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "own", "lora_path": "one"}
    assert post(server, body, load)[0] == 401
    assert post(server, body, load, KEY)[0] == 200
    assert ask(server, model="own") == expected(root / "dir/one")
    assert post(server, body, load, KEY)[0] == 400
    moved = body | {"lora_path": "team/two", "load_inplace": True}
    assert post(server, moved, load, KEY)[0] == 200
    assert ask(server, model="own") == expected(root / "dir/team/two")
    assert post(server, {"lora_name": "own"}, unload, KEY)[0] == 200
    assert post(server, {"lora_name": "own"}, unload, KEY)[0] == 404
    assert ask(server, model="own")[0] == 404
    for wrong in ({}, [], {"lora_name": 1}, {"lora_name": "base", "lora_path": "one"}):
        assert post(server, wrong, load, KEY)[0] == 400
    for name in ("a:b", "a\n", "n" * 201, "default_model"):
        assert post(server, {"lora_name": name, "lora_path": "one"}, load, KEY)[0] == 400


def test_only_the_admins_key_changes_adapters_if_there_is_one(root):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body, admin = {"lora_name": "own", "lora_path": "one"}, {"X-Api-Key": "boss"}.items()
    flags = ("--adapters-dir", str(root / "dir"), "--admin-key", "boss")
    for flag, key in (((), ()), (("--api-key", "k"), KEY)):
        with live(*flags, *flag) as server:
            for path in (load, unload):
                status, _, content = post(server, body, path, key)
                assert status == 403 and content["error"]["code"] == "forbidden"
            assert post(server, {"prompt": CODE, "model": "own"}, headers=admin)[0] == 404
            assert post(server, body, load, admin)[0] == 200
            own = {"prompt": CODE, "model": "own", "max_tokens": TOKENS, "temperature": 0}
            _, _, content = post(server, own, headers=key)
            assert content["choices"][0]["text"] == expected(root / "dir/one")
            assert post(server, {"lora_name": "own"}, unload, admin)[0] == 200


def test_a_refusal_names_the_field(server):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    wrong = {
        "lora_path": post(server, {"lora_name": "own", "lora_path": "no"}, load, KEY),
        "lora_name": post(server, {"lora_name": "own"}, unload, KEY),
        "adapters": post(server, {"prompt": CODE, "adapters": "no"}, headers=KEY),
    }
    for field, (status, _, content) in wrong.items():
        assert status == 404 and content["error"]["param"] == field
        assert content["error"]["message"].startswith(f"{field}: adapter")


FLAGS = {
    "--adapters-dir is /nowhere: expected a directory": ["--adapters-dir", "/nowhere"],
    "--adapter has the name 'default_model'": ["--adapter", "default_model=a"],
    "--adapter has the name 'm'": ["--adapter", "m=a", "--served-model-name", "n,m"],
    "expected NAME=PATH with a printable name, got 'a\\n=a'": ["--adapter", "a\n=a"],
}


@pytest.mark.parametrize("message", FLAGS)
def test_flags_that_no_request_could_use_are_refused(message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--model", "x", *FLAGS[message]])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in line


def test_a_broken_adapter_ends_no_other_request(server, root):
    folder = write_adapter(root / "dir/broken", random_arrays(load_model()[0], 9))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"x.lora_a": mx.zeros((2, 2))})
    status, error = ask(server, adapters="broken")
    assert status == 400 and "x.lora_a" in error["message"]
    assert ask(server) == expected()


def test_without_a_folder_there_are_no_adapters():
    with live() as server:
        assert post(server, {"lora_name": "a", "lora_path": "b"}, "/v1/load_lora_adapter")[0] == 404
        status, _, content = post(server, {"prompt": "a", "adapters": "/etc"})
        assert status == 404 and "not served here" in content["error"]["message"]
