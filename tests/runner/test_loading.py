"""Models that are loaded by name."""

import json
import shutil
from io import StringIO

import mlx.core as mx
import pytest
from huggingface_hub.utils import hf_raise_for_status

from mlx_paged import demo_model_path, loading
from mlx_paged.generate.flags import make_parser


def ops_of_the_random_state() -> int:
    """How many operations MLX still has to compute for its next random number."""
    graph = StringIO()
    mx.export_to_dot(graph, *mx.random.state)
    return graph.getvalue().count("shape=rectangle")


def test_a_load_leaves_no_graph_in_the_random_state():
    mx.random.uniform()
    assert ops_of_the_random_state() > 0  # what is counted exists
    loading.load_model()
    assert ops_of_the_random_state() == 0


def test_a_failed_load_leaves_no_graph_in_the_random_state(monkeypatch):
    def failing(*_args, **_options):
        mx.random.uniform()
        raise RuntimeError("no weights")

    monkeypatch.setattr(loading, "load", failing)
    with pytest.raises(ValueError, match="no weights"):
        loading.load_model()
    assert ops_of_the_random_state() == 0


def test_a_tokenizer_that_cannot_encode_is_not_loaded(tmp_path):
    folder = shutil.copytree(demo_model_path(), tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "8192"}))
    with pytest.raises(ValueError, match="model: cannot be loaded"):
        loading.load_model(str(folder))


@pytest.mark.parametrize(
    ("status", "code", "message", "expected"),
    [
        (
            401,
            "GatedRepo",
            "Access to model meta/llama is restricted. Please log in.",
            "(GatedRepoError: Access to model meta/llama is restricted. Please log in; `hf auth"
            " login` logs in)",
        ),
        (
            404,
            "RepoNotFound",
            "Repository not found",
            "(RepositoryNotFoundError: the hub has no such model, or you may not read it; `hf auth"
            " login` logs in)",
        ),
        (
            403,
            "",
            "Storage is locked",
            "(HfHubHTTPError: 403 Forbidden: Storage is locked.; Make sure your token has the"
            " correct permissions)",
        ),
    ],
    ids=["gated", "misspelt", "forbidden"],
)
def test_the_reason_of_a_hub_is_shown(monkeypatch, status, code, message, expected):
    """The hub's package raises what the hub answers: the status first, the reason last."""
    httpx = pytest.importorskip("httpx2", reason="the hub's package is older and has httpx")

    def refused(*_args, **_options):
        headers = {"X-Error-Message": message, "X-Request-Id": "Root=1"} | (
            {"X-Error-Code": code} if code else {}
        )
        url = "https://huggingface.co/api/models/meta/llama/revision/main"
        request = httpx.Request("GET", url)
        hf_raise_for_status(httpx.Response(status, headers=headers, request=request))

    monkeypatch.setattr(loading, "load", refused)
    with pytest.raises(ValueError) as raised:
        loading.load_model("meta/llama")
    assert str(raised.value) == f"model meta/llama: not here and not from the hub {expected}"


def test_what_belongs_to_the_model_of_the_flags_is_no_other_models():
    given = ["--kv-disk", "d", "--kv-disk-gb", "3", "--adapter", "a=b", "--max-running", "7"]
    args = make_parser().parse_args(["-p", "x", *given])
    options = loading.engine_options(args)
    assert (options["kv_disk"], options["kv_disk_gb"], options["adapters"]) == ("d", 3, {"a": "b"})
    others = loading.engine_options(loading.of_another_model(args))
    assert (others["kv_disk"], others["adapters"]) == (None, None) and "kv_disk_gb" not in others
    assert options["max_running"] == others["max_running"] == 7
