"""Which models requests may name, what the names mean, and what is loaded in whose place."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import constants

from mlx_paged.cli import demo_model_path
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.server import flags as server_flags
from mlx_paged.server import model_files
from mlx_paged.server.model_names import ModelNames
from tests.support.commands.server_harness import (
    CODE,
    client,
    exchange,
    live,
    only_model,
    post,
    wait_until,
)

HUB = "--models-dir", "models"
OTHERS = ("--host", "0.0.0.0")
NEEDED = "start with --max-models 2"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory: models/one, models/owner/two, a link, and a cache with org/three."""
    for name in ("models/one", "models/owner/two", "elsewhere", *snapshots("three", "four")):
        shutil.copytree(demo_model_path(), tmp_path / name)
    for name in ("three", "four"):
        (tmp_path / f"hub/models--org--{name}/refs").mkdir()
        (tmp_path / f"hub/models--org--{name}/refs/main").write_text(f"hash-{name}")
    (tmp_path / "link").symlink_to("models/one")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snapshots(*names):
    return [f"hub/models--org--{name}/snapshots/hash-{name}" for name in names]


def names(*flags):
    return ModelNames(server_flags.parse([*flags]))


def ask(server, model, **options):
    return post(server, {"model": model, "prompt": CODE, "max_tokens": 2} | options)


@pytest.mark.parametrize("given", ["models/one", "./models/one/", "link", "ABSOLUTE"])
def test_every_spelling_of_the_default_model_means_it(here, given):
    given = given.replace("ABSOLUTE", str(here / "models/one"))
    spellings = [given, "default_model", "models/one", "./models/one", "models/one/", "one"]
    spellings += ["models/../models/one", str(here / "models/one"), "link", str(here / "link")]
    for flags in ([], ["--max-models", "0"], ["--max-models", "2", *HUB], OTHERS):
        found = names("--model", given, *flags)
        assert {found.path(name) for name in spellings} == {given}


@pytest.mark.parametrize("given", ["org/three", *snapshots("three")])
def test_a_snapshot_and_its_id_are_one_model(here, given):
    for flags in ([], ["--allow-models", ""], OTHERS, ["--max-models", "2"]):
        found = names("--model", given, *flags)
        spellings = ["org/three", *snapshots("three"), str(here / snapshots("three")[0])]
        assert {found.path(name) for name in [*spellings, "hash-three"]} == {given}


def test_a_model_is_loaded_once_whatever_it_is_called(here):
    with live("--model", "./models/one", "--max-models", "3", *HUB) as server:
        for name in ("one", "models/one/", str(here / "link"), "default_model"):
            assert ask(server, name)[0] == 200
        assert len(server.models.loaded) == 1
        for name in ("owner/two", "models/owner/two", str(here / "models/owner/../owner/two")):
            assert ask(server, name)[0] == 200
        assert len(server.models.loaded) == 2


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        ([], {"org/three", "org/four"}),
        (["--host", "localhost"], {"org/three", "org/four"}),
        (["--host", "::1"], {"org/three", "org/four"}),
        (["--uds", "socket"], {"org/three", "org/four"}),
        (["--allow-models", ""], set()),
        (["--allow-models", "org/three,elsewhere"], {"org/three", "elsewhere", "ELSEWHERE"}),
        (OTHERS, set()),
        ([*OTHERS, "--allow-models", "org/four"], {"org/four"}),
        (
            [*OTHERS, *HUB],
            {"one", "owner/two", "models/one", "models/owner/two", "ONE", "link"},
        ),
        ([*HUB, "--allow-models", ""], {"one", "owner/two", "models/one", "ONE", "link"}),
    ],
    ids=lambda value: " ".join(sorted(value)),  # the same in every worker
)
def test_only_listed_models_may_be_named(here, flags, known):
    absolute = {"ELSEWHERE": str(here / "elsewhere"), "ONE": str(here / "models/one")}
    tried = {"org/three", "org/four", "elsewhere", "one", "owner/two", "models/one", "link"}
    tried |= {"models/owner/two", "ONE", "ELSEWHERE", "..", "/", "", "org/none", "a\0b", "a" * 5000}
    found = names("--model", str(demo_model_path()), "--max-models", "2", *flags)
    served, refusals = set(), set()
    for name in tried:
        try:
            found.path(absolute.get(name, name))
            served.add(name)
        except Refusal as error:
            assert (error.status, error.code) == (404, "model_not_found")
            refusals.add(str(error).partition(" is not ")[2])
    assert served == known | ({"models/owner/two"} if HUB[0] in flags else set())
    assert len(refusals) == 1  # no answer tells what is on the disk


def test_a_pinned_model_has_no_other_in_its_place(here):
    with live(*HUB) as server:
        before = only_model(server)
        for name in ("one", "owner/two", "org/three"):
            status, _, answer = ask(server, name)
            assert status == 404 and NEEDED in answer["error"]["message"]
            assert exchange(server, "GET", f"/v1/models/{name}")[0] == 404
        assert only_model(server) is before
        listed = json.loads(exchange(server, "GET", "/v1/models")[2])["data"]
        assert [entry["id"] for entry in listed] == server.models.names.served


def test_others_share_the_places_that_the_default_model_leaves(here):
    with live("--max-models", "2", "--idle-seconds", "1000", *HUB) as server:
        default = only_model(server)
        for name in ("one", "owner/two", "org/three", "one"):
            assert ask(server, name)[0] == 200
            assert len(server.models.loaded) == 2 and default in server.models.loaded.values()


def broken(directory):
    """Copies of the demo model that cannot be loaded, by what is wrong."""
    demo = demo_model_path()
    weights = (demo / "model.safetensors").read_bytes()
    config = json.loads((demo / "config.json").read_text())
    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    for name, file, content in (
        ("cut-off", "model.safetensors", weights[:-1]),
        ("no-header", "model.safetensors", weights[:4]),
        ("other-format", "model.safetensors", b"PK" * 100),
        ("a-shard-less", "model.safetensors.index.json", index.encode()),
        ("unknown-kind", "config.json", json.dumps(config | {"model_type": "none"}).encode()),
        ("own-code", "config.json", json.dumps(config | {"model_file": "evil.py"}).encode()),
        ("a-list", "config.json", b"[]"),
        ("no-json", "config.json", b"{"),
    ):
        shutil.copytree(demo, directory / name)
        (directory / name / file).write_bytes(content)
        if file == "config.json":
            (directory / name / "evil.py").write_text("raise SystemExit")
    shutil.copytree(demo, directory / "no-weights")
    (directory / "no-weights/model.safetensors").unlink()
    shutil.copytree(demo, directory / "no-tokenizer")
    for file in (directory / "no-tokenizer").glob("token*"):
        file.unlink()
    (directory / "gone-weights").mkdir()
    for file in demo.iterdir():
        (directory / "gone-weights" / file.name).symlink_to(directory / "nowhere" / file.name)


def test_a_model_that_cannot_be_loaded_leaves_the_others_loaded(tmp_path):
    broken(tmp_path)
    with live("--unpin-default", "--models-dir", str(tmp_path)) as server:
        before = only_model(server)
        for directory in sorted(tmp_path.iterdir()):
            status, _, answer = ask(server, directory.name)
            assert status == 404, directory
            assert answer["error"]["code"] == "model_not_found"
            assert only_model(server) is before
            assert exchange(server, "GET", f"/v1/models/{directory.name}")[0] == 404
        listed = json.loads(exchange(server, "GET", "/v1/models")[2])["data"]
        assert [entry["id"] for entry in listed] == server.models.names.served


def test_a_model_whose_files_say_nonsense_leaves_the_others_loaded(tmp_path):
    """Only those that load such files find out."""
    demo = demo_model_path()
    config = json.loads((demo / "config.json").read_text())
    for name, file, content in (
        ("no-object", "generation_config.json", "[]"),
        ("cut-off", "tokenizer.json", (demo / "tokenizer.json").read_text()[:1000]),
        ("no-scaling", "config.json", json.dumps(config | {"rope_scaling": []})),
        ("few-layers", "config.json", json.dumps(config | {"num_hidden_layers": 0})),
    ):
        shutil.copytree(demo, tmp_path / name)
        (tmp_path / name / file).write_text(content)
    with live("--unpin-default", "--models-dir", str(tmp_path)) as server:
        before = only_model(server)
        for directory in sorted(tmp_path.iterdir()):
            status, _, answer = ask(server, directory.name)
            assert status == 404 and "cannot be loaded" in answer["error"]["message"], directory
            assert only_model(server) is before


def test_what_is_listed_has_the_limit_that_errors_name(here):
    flags = ["--max-models", "3", "--kv-memory", "0.012", *HUB]
    with live(*flags) as server:
        listed = json.loads(exchange(server, "GET", "/v1/models")[2])["data"]
        limits = {entry["id"]: entry["max_model_len"] for entry in listed}
        default = server.models.names.served[0]
        assert [*limits] == [default, "one", "org/four", "org/three", "owner/two"]
        assert limits["one"] == 2048 != limits[default]
        for name in (default, "one", "org/three"):
            error = ask(server, name, prompt=[5] * 3000)[2]["error"]
            found = exchange(server, "GET", f"/v1/models/{name.replace('/', '%2F')}")[2]
            limit = json.loads(found)["max_model_len"]
            assert f"maximum context length is {limit} tokens" in error["message"]
        headers = {"anthropic-version": "2023-06-01"}
        _, _, found = exchange(server, "GET", "/v1/models", headers=headers)
        assert json.loads(found)["data"][0]["max_model_len"] == limits[default]


def test_a_repository_without_weights_is_not_listed(here):
    (here / snapshots("four")[0] / "model.safetensors").unlink()
    found = names("--model", str(demo_model_path()), "--max-models", "2")
    assert [known.name for known in found.others()] == ["org/three"]


@pytest.mark.parametrize(
    ("flags", "name", "runs"),
    [
        (["--models-dir", "models", "--trust-remote-code"], "one", True),
        (["--models-dir", "models"], "one", False),
        (["--allow-models", "elsewhere", "--trust-remote-code"], "elsewhere", True),
        (["--trust-remote-code"], "elsewhere", False),
        (["--trust-remote-code"], "org/three", False),
    ],
    ids=str,
)
def test_code_runs_of_models_that_a_flag_names_only(here, flags, name, runs):
    for directory in (here / "models/one", here / "elsewhere", here / snapshots("three")[0]):
        config = json.loads((directory / "config.json").read_text()) | {"model_file": "own.py"}
        (directory / "config.json").write_text(json.dumps(config))
        code = f"import pathlib\npathlib.Path({str(here / 'ran')!r}).touch()\n"
        code += "from mlx_lm.models.qwen3 import Model, ModelArgs\n"
        (directory / "own.py").write_text(code)
    with live("--max-models", "2", *flags) as server:
        assert ask(server, name)[0] == (200 if runs else 404)
    assert (here / "ran").exists() is runs


def test_requests_for_the_loaded_model_run_on_while_another_waits(here):
    """The other one is loaded when they have ended."""
    flags = ["--unpin-default", "--swap-seconds", "1000", *HUB]
    with live(*flags) as server, client(server) as own:
        stream = own.completions.create(
            model="default_model",
            prompt=CODE,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        found = []
        other = threading.Thread(target=lambda: found.append(ask(server, "one")[0]))
        other.start()
        wait_until(server.models._turn.locked)
        for _ in range(3):
            assert ask(server, None)[0] == 200
        assert not found and server.models._leaving is None
        stream.close()
        other.join()
        assert found == [200] and only_model(server).name == str(here / "models/one")


def test_a_swap_does_not_wait_for_ever(here):
    """After a time the loaded model takes no more requests, though one still runs."""
    flags = ["--unpin-default", "--swap-seconds", "0.2", *HUB]
    with live(*flags) as server, client(server) as own, ThreadPoolExecutor(2) as pool:
        stream = own.completions.create(
            model="default_model",
            prompt=CODE,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        default = only_model(server)
        other = pool.submit(ask, server, "one")
        wait_until(lambda: server.models._leaving is default)
        late = pool.submit(ask, server, "default_model")
        stream.close()
        assert other.result()[0] == late.result()[0] == 200
        assert only_model(server) is not default


def test_a_directory_of_models_must_be_there(capsys):
    with pytest.raises(SystemExit):
        names("--models-dir", "/nowhere")
    assert ": --models-dir is /nowhere: expected a directory\n" in capsys.readouterr().err


def test_the_demo_model_has_all_its_files():
    assert model_files.problem(demo_model_path(), trusts=False, sees=False) is None
