"""The patch of mlx-lm is scoped, reversible, and says which versions it knows."""

import subprocess
import sys
import threading
from contextlib import ExitStack
from importlib.util import LazyLoader, module_from_spec, spec_from_file_location
from types import ModuleType

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import make_sampler

from mlx_paged import Engine, arguments
from mlx_paged.attention import sdpa_hook
from mlx_paged.attention.forward import path_counts
from mlx_paged.attention.sdpa_hook import mlx_attention
from mlx_paged.drop_in import caches, patch
from mlx_paged.drop_in.kv_caches import KVCache
from mlx_paged.drop_in.patch import (
    TESTED_MLX_LM,
    UntestedVersionError,
    _replace,
    patch_mlx_lm,
    patched_mlx_lm,
    unpatch_mlx_lm,
)
from mlx_paged.ops import BUILT_WITH
from tests.support.models.tiny_models import tiny_model

mlx_eval = mx.eval

GENERATE = sys.modules["mlx_lm.generate"]


@pytest.fixture(autouse=True)
def _restored():
    yield
    unpatch_mlx_lm()
    assert not is_patched()


def is_patched() -> bool:
    """Whether everything is patched; fails if only some of it is."""
    signs = {
        stock.make_prompt_cache is not patch.stock_make_prompt_cache,
        GENERATE.make_prompt_cache is not patch.stock_make_prompt_cache,
        mx.fast.scaled_dot_product_attention is not mlx_attention,
        type(stock.KVCache()) is not stock.KVCache,
        mx.eval is not mlx_eval,
        GENERATE.BatchGenerator.insert_segments is not patch.stock_insert_segments,
        GENERATE.PromptProcessingBatch.prompt is not patch.stock_prompt,
    }
    assert len(signs) == 1
    return signs.pop()


def test_a_scope_patches_and_restores_even_after_an_error():
    with patched_mlx_lm():
        assert is_patched()
    assert not is_patched()
    with pytest.raises(RuntimeError), patched_mlx_lm():
        raise RuntimeError
    assert not is_patched()


def test_the_lasting_patch_is_idempotent():
    unpatch_mlx_lm()
    patch_mlx_lm()
    patch_mlx_lm()
    assert is_patched()
    unpatch_mlx_lm()
    assert not is_patched() and sdpa_hook._hook._num_active == 0
    unpatch_mlx_lm()


def test_scopes_nest_within_each_other_and_the_lasting_patch():
    with patched_mlx_lm():
        with patched_mlx_lm():
            patch_mlx_lm()
        unpatch_mlx_lm()
        assert is_patched()
    assert not is_patched()
    patch_mlx_lm()
    with patched_mlx_lm():
        pass
    assert is_patched()


def test_scopes_overlap_in_threads():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with patched_mlx_lm():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with patched_mlx_lm():
        thread.start()
        assert entered.wait(10)
    assert is_patched()
    leave.set()
    thread.join()


def test_the_innermost_options_hold():
    model = tiny_model("llama")

    def block_size() -> int:
        return GENERATE.make_prompt_cache(model)[0].layer.pool.block_size

    patch_mlx_lm(block_size=2)
    with patched_mlx_lm(block_size=4):
        with patched_mlx_lm(block_size=8):
            assert block_size() == 8
        assert block_size() == 4
    assert block_size() == 2
    patch_mlx_lm(block_size=32)
    assert block_size() == 32
    first, second = patched_mlx_lm(block_size=4), patched_mlx_lm(block_size=8)
    with first, ExitStack() as overlapping:
        overlapping.enter_context(second)
        leaving = overlapping.pop_all()
    assert block_size() == 8
    leaving.close()
    assert block_size() == 32


def test_what_others_replace_meanwhile_is_left_to_them(monkeypatch):
    patch_mlx_lm()
    theirs = stock.make_prompt_cache
    monkeypatch.setattr(stock, "make_prompt_cache", lambda *args: theirs(*args))
    patch_mlx_lm()
    assert sdpa_hook._hook._num_active == 1
    unpatch_mlx_lm()
    assert sdpa_hook._hook._num_active == 0 and mx.eval is mlx_eval
    monkeypatch.undo()
    assert type(stock.make_prompt_cache(tiny_model("llama"))[0]) is stock.KVCache
    _replace({theirs: patch.stock_make_prompt_cache})


@pytest.mark.slow
def test_a_module_imported_meanwhile_is_restored_too(tmp_path):
    code = (
        "import sys; from mlx_paged.drop_in.patch import patched_mlx_lm\n"
        "with patched_mlx_lm():\n"
        "    import mlx_lm.server, mlx_lm.models.cache as cache\n"
        "    assert mlx_lm.server.make_prompt_cache is cache.make_prompt_cache\n"
        "    held = (cache.make_prompt_cache, cache.save_prompt_cache)\n"
        "assert mlx_lm.server.make_prompt_cache is cache.make_prompt_cache is not held[0]\n"
        "class Model: layers = [0]\n"
        "assert type(held[0](Model())[0]) is cache.KVCache\n"
        "with patched_mlx_lm():\n"
        "    paged = held[0](Model())\n"
        "held[1](sys.argv[1], paged)\n"
        "assert type(cache.load_prompt_cache(sys.argv[1])[0]) is cache.KVCache\n"
    )
    file = str(tmp_path / "cache.safetensors")
    subprocess.run([sys.executable, "-c", code, file], check=True)


class Holder(ModuleType):
    """A module with mlx-lm's function under a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.make = stock.make_prompt_cache
        self.unrelated = []


class Refusing(Holder):
    """Takes no attribute once it has been made."""

    def __setattr__(self, name: str, value: object) -> None:
        if "unrelated" in vars(self):
            raise TypeError("read only")
        super().__setattr__(name, value)


class Changing(Holder):
    """Its names and the loaded modules change when a name is set."""

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)[f"{name}_{len(vars(self))}"] = None
        sys.modules[f"changing_{len(sys.modules)}"] = None
        super().__setattr__(name, value)


@pytest.fixture
def loaded(monkeypatch):
    """Loads modules, or what stands for them; unloads all that were loaded meanwhile."""
    before = sys.modules.copy()
    yield lambda name, module: monkeypatch.setitem(sys.modules, name, module)
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


@pytest.mark.parametrize("kind", [Holder, Changing])
def test_names_of_other_modules_are_rebound_and_restored(kind, loaded):
    early = kind("early")
    unrelated = early.unrelated
    loaded("early", early)
    with patched_mlx_lm():
        assert early.make is stock.make_prompt_cache is not patch.stock_make_prompt_cache
        late = kind("late")
        loaded("late", late)
    assert early.make is late.make is stock.make_prompt_cache is patch.stock_make_prompt_cache
    assert early.unrelated is unrelated


def test_names_of_the_callers_own_for_this_packages_functions_stay(loaded):
    own = Holder("own")
    own.make = caches.make_prompt_cache
    loaded("own", own)
    with patched_mlx_lm():
        pass
    assert own.make is caches.make_prompt_cache


def test_a_module_that_refuses_is_named_once_and_the_others_are_rebound(loaded):
    refusing, last = Refusing("refusing"), Holder("last")
    refusing.__dict__["second"] = stock.make_prompt_cache
    loaded("refusing", refusing)
    loaded("last", last)
    with pytest.warns(RuntimeWarning, match=r"modules: refusing \(.*read only") as told:
        patch_mlx_lm()
    assert len(told) == 1 and is_patched()
    assert last.make is stock.make_prompt_cache
    assert refusing.make is patch.stock_make_prompt_cache
    unpatch_mlx_lm()
    assert last.make is refusing.make is stock.make_prompt_cache


def test_a_warning_that_is_an_error_leaves_a_scope_whole(loaded):
    loaded("refusing", Refusing("refusing"))
    with pytest.raises(RuntimeWarning), patched_mlx_lm():
        raise AssertionError
    assert not is_patched()


def test_what_is_no_module_and_what_is_not_loaded_yet_is_left_alone(loaded, tmp_path):
    (tmp_path / "lazy.py").write_text("raise AssertionError('it was loaded')")
    spec = spec_from_file_location("lazy", tmp_path / "lazy.py")
    spec.loader = LazyLoader(spec.loader)
    lazy = module_from_spec(spec)
    spec.loader.exec_module(lazy)
    for name, module in {"lazy": lazy, "none": None, "slots": object(), "class": Holder}.items():
        loaded(name, module)
    with patched_mlx_lm():
        assert is_patched()
    with pytest.raises(AssertionError, match="it was loaded"):
        _ = lazy.anything


@pytest.mark.slow
def test_a_script_may_bind_names_before_the_import_line():
    code = (
        "from mlx_lm.models.cache import KVCache, make_prompt_cache\n"
        "import mlx_paged.auto_patch\n"
        "from mlx_paged.loading import load_model\n"
        "kind = type(make_prompt_cache(load_model()[0])[0])\n"
        "assert kind.__module__ == 'mlx_paged.drop_in.kv_caches' and issubclass(kind, KVCache)\n"
        "mlx_paged.unpatch_mlx_lm()\n"
        "assert type(make_prompt_cache(load_model()[0])[0]) is KVCache\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_untested_mlx_lm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(mlx_lm, "__version__", "0.99.0")
    with pytest.raises(UntestedVersionError, match=rf"0\.99\.0.*{TESTED_MLX_LM[0]}"):
        patch_mlx_lm()
    with pytest.raises(UntestedVersionError), patched_mlx_lm():
        raise AssertionError
    assert not is_patched()
    monkeypatch.setenv("MLX_PAGED_ALLOW_UNTESTED_MLX_LM", "1")
    with patched_mlx_lm():
        assert is_patched()


def test_the_installed_mlx_lm_is_tested():
    assert mlx_lm.__version__ in TESTED_MLX_LM


@pytest.mark.parametrize("option", ["block_size", "kv_memory"])
def test_mistaken_options_patch_nothing(option):
    with pytest.raises(ValueError, match=f"{option} is 0"):
        patch_mlx_lm(**{option: 0})
    assert not is_patched()


@pytest.mark.slow
def test_scripts_get_the_text_of_stock_caches(demo):
    """generate, stream_generate with a draft model, and batch_generate with a sampler."""
    model, tokenizer = demo
    prompts = ["def add(a, b):\n", "import os\n\n\ndef main():\n    path", "class A"]

    def run() -> list:
        mx.random.seed(3)
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
        drafted = stream_generate(
            model, tokenizer, prompts[1], draft_model=tiny_draft, max_tokens=24
        )
        return [
            generate(model, tokenizer, prompts[0], max_tokens=24),
            "".join(response.text for response in drafted),
            batch_generate(model, tokenizer, encoded, max_tokens=[9, 20, 3]).texts,
            generate(model, tokenizer, prompts[2], max_tokens=9, sampler=make_sampler(temp=0.7)),
        ]

    tiny_draft = model
    expected = run()
    with patched_mlx_lm():
        path_counts.clear()
        assert run() == expected
        assert path_counts["paged"] > 0


def test_the_prompt_cache_is_paged_where_mlx_lm_makes_it(demo):
    model, tokenizer = demo
    with patched_mlx_lm():
        (cache,) = batch_generate(
            model, tokenizer, [[1, 2, 3]], max_tokens=2, return_prompt_caches=True
        ).caches
    assert {type(c) for c in cache} == {KVCache}


def test_an_engine_may_be_made_while_mlx_lm_is_patched():
    with patched_mlx_lm():
        engine = Engine(tiny_model("qwen3"), block_size=4, num_blocks=32)
    (done,) = engine.generate([[1, 2, 3]], max_tokens=3)
    assert len(done.tokens) == 3


def installed(monkeypatch, **versions: str) -> None:
    found = {"mlx": "0.32.4", "mlx-lm": "0.32.2", **versions}
    needs = ["mlx-lm>=0.32.2", "mlx[cpu]==0.32.4"]
    monkeypatch.setattr("importlib.metadata.version", found.__getitem__)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)


ONE = r"pip install 'mlx(\[cpu\])?==0\.32\.4'"
BOTH = rf"{ONE} 'mlx-lm==0\.32\.2'"


@pytest.mark.parametrize("allowed", ["0", "1"])
@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("mlx-lm", "0.31.3", rf"mlx-lm 0\.31\.3 is installed: expected 0\.32: {BOTH}"),
        ("mlx-lm", "0.33.0", rf"mlx-lm 0\.33\.0 is installed: expected 0\.32: {BOTH}"),
        ("mlx", "0.31.2", rf"mlx 0\.31\.2 is installed: expected 0\.32\.4, for which.*: {ONE}"),
        ("mlx", "0.32.5", rf"mlx 0\.32\.5 is installed: expected 0\.32\.4, for which.*: {ONE}"),
        ("mlx", "0.33.0", rf"mlx 0\.33\.0 is installed: expected 0\.32\.4, for which.*: {ONE}"),
    ],
)
def test_a_version_that_cannot_run_is_named(monkeypatch, allowed, name, version, message):
    monkeypatch.setenv("MLX_PAGED_ALLOW_UNTESTED_MLX_LM", allowed)
    installed(monkeypatch, **{name: version})
    with pytest.raises(UntestedVersionError, match=f"^{message}$"):
        arguments.require_versions()


def test_an_upgrade_of_both_is_mended_by_one_command(monkeypatch):
    """As `pip install -U mlx-lm` leaves them."""
    installed(monkeypatch, **{"mlx": "0.32.5", "mlx-lm": "0.32.3"})
    with pytest.raises(UntestedVersionError, match=rf"^mlx 0\.32\.5 is installed.*: {BOTH}$"):
        arguments.require_versions()


@pytest.mark.parametrize("versions", [{"mlx": "0.33.0"}, {"mlx-lm": "0.33.0"}])
def test_a_variable_lets_any_version_pass(monkeypatch, caplog, versions):
    installed(monkeypatch, **versions)
    monkeypatch.setenv("MLX_PAGED_ANY_MLX", "1")
    arguments._warn_once.cache_clear()
    for _ in range(2):
        arguments.require_versions()
    ((name, version),) = versions.items()
    assert len(caplog.messages) == 1 and f"{name} {version} is installed" in caplog.messages[0]
    monkeypatch.setenv("MLX_PAGED_ANY_MLX", "0")
    with pytest.raises(UntestedVersionError):
        arguments.require_versions()


@pytest.mark.parametrize(
    ("name", "version", "lines"),
    [
        ("mlx-lm", "0.32.2", []),
        ("mlx-lm", "0.32.9", ["mlx-lm 0.32.9 is untested: 0.32.2 is tested"]),
        ("mlx", "0.32.4.dev20261101+abc", []),
    ],
)
def test_an_untested_mlx_lm_is_named_in_one_line(monkeypatch, caplog, name, version, lines):
    installed(monkeypatch, **{name: version})
    arguments.require_versions()
    assert caplog.messages == lines


def test_the_pin_of_mlx_is_found(monkeypatch):
    """In the metadata of this installation."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.30.0")
    with pytest.raises(UntestedVersionError, match=f"expected {BUILT_WITH['mlx']}"):
        arguments.require_versions()
