"""Which K/V is the same, and who may use a directory."""

import os
from unittest import mock

import pytest
from mlx.utils import tree_map

from mlx_paged.kv_disk import opening
from mlx_paged.kv_disk.packs import PackFiles
from mlx_paged.runner import pooled_model
from tests.support.engine.disk_engines import make_engine, outputs, tokens_of
from tests.support.models import tiny_models


@pytest.mark.slow
@pytest.mark.parametrize("change", ["weights", "tokenizer", "block_size", "salt", "options"])
def test_nothing_is_found_by_who_must_not_find_it(change, tmp_path):
    model, prompts = tiny_models.tiny_model("llama"), [tokens_of(0)]
    outputs(model, prompts, tmp_path)
    options = {}
    if change == "weights":
        model.update(tree_map(lambda weight: weight * 1.001, model.parameters()))
    elif change == "options":
        model.args.rope_theta = 20000.0
    elif change == "salt":
        options["salt"] = "tenant"
    elif change == "block_size":
        options["block_size"] = 8
    with mock.patch.object(
        opening, "_vocabulary", lambda tokenizer: "other" if change == "tokenizer" else ""
    ):
        if change == "tokenizer":
            found = outputs(model, prompts, tmp_path, **options)
        else:
            mock.patch.stopall()
            found = outputs(model, prompts, tmp_path, **options)
    assert found[1] == [0] and found[2]["hits"] == 0
    assert found[0] == outputs(model, prompts, **options)[0]


def test_the_hash_of_weights_is_kept_while_their_files_do_not_change(tmp_path):
    model, files, cache = tiny_models.tiny_model("llama"), tmp_path / "model", tmp_path / "cache"
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"weights")
    first = opening.weights_hash(model, [files], cache)
    with mock.patch.object(opening, "_arrays_hash", side_effect=AssertionError("hashed again")):
        assert opening.weights_hash(model, [files], cache) == first
        times = os.stat(files / "model.safetensors")
        (files / "model.safetensors").write_bytes(b"Weights")
        os.utime(files / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(AssertionError, match="hashed again"):
            opening.weights_hash(model, [files], cache)
        with pytest.raises(AssertionError, match="hashed again"):
            opening.weights_hash(model, [files, tmp_path], cache)
    cache.write_bytes(b"\xff not json")
    assert opening.weights_hash(model, [files], cache) == first
    assert opening.weights_hash(model, [], cache) == first
    model.update(tree_map(lambda weight: weight * 1.001, model.parameters()))
    assert opening.weights_hash(model, [], cache) != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk_gb": 0}, "kv_disk_gb is 0: expected a number > 0"),
        ({"prefix_cache": False}, "prefix_cache is False: expected True with kv_disk"),
    ],
)
def test_wrong_options_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_models.tiny_model("llama"), tmp_path, **options)


@pytest.mark.slow
def test_two_engines_do_not_share_a_directory(tmp_path):
    model, link = tiny_models.tiny_model("llama"), tmp_path / "link"
    (tmp_path / "directory").mkdir()
    link.symlink_to(tmp_path / "directory")
    engine = make_engine(model, tmp_path / "directory")
    for _ in range(2):  # the refused one does not end the lock
        for path in (tmp_path / "directory", link):
            with pytest.raises(ValueError, match=f"process {os.getpid()} uses: expected a"):
                make_engine(model, path)
    engine.close()
    make_engine(model, link).close()


@pytest.mark.parametrize("failing", [(opening, "identity"), (pooled_model, "KVPool")])
def test_an_engine_that_cannot_be_made_leaves_the_directory(failing, tmp_path):
    model = tiny_models.tiny_model("llama")
    with (
        mock.patch.object(*failing, side_effect=RuntimeError("no")),
        pytest.raises(RuntimeError, match="no") as error,  # which keeps all locals alive
    ):
        make_engine(model, tmp_path)
    PackFiles(tmp_path, 1).close()
    assert error.traceback
