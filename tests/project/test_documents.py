"""What the documents name is there: classes, attributes, arguments, flags, files, links, variables.

Names of other projects and words of other languages are not looked up: see the exceptions.
"""

import argparse
import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import mlx_paged
from mlx_paged.metrics.recorder import TickLog
from mlx_paged.metrics.tick import Tick
from tests.support.documents import ROOT, documents, flags, prose, snippets, spans

DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in documents()}
CLASSES = {
    name: kind
    for name in mlx_paged.__all__
    if inspect.isclass(kind := getattr(mlx_paged, name)) and not issubclass(kind, Exception)
}
OBJECTS = CLASSES | {
    "Tick": Tick,
    "engine": mlx_paged.Engine,
    "engine.ticks": TickLog,
    "kv": mlx_paged.KVBlockManager,
}
"""What the first part of a dotted name means, beside modules."""
MODULES = {"mx": "mlx.core", "nn": "mlx.nn", "copy": "copy", "functools": "functools"}
MODULES |= {name: name for name in ("mlx_paged", "mlx_lm", "mlx", "bench", "scripts")}
ERRORS = {mlx_paged.OutOfBlocksError, mlx_paged.UnsupportedModelError}
TOOLS = {"mlx.launch", "mlx.distributed_config"}  # commands of MLX
MADE_BY_PATCHES = {"mx.fast.paged_attention"}

COMMANDS = {
    *(
        f"mlx_paged.{name}"
        for name in ("generate", "server", "doctor", "run", "kv_disk", "heads", "terminal")
    ),
    *("bench.admission", "bench.host_cost", "bench.memory", "bench.paged_attention"),
    *("bench.adapters", "bench.agent_trace", "bench.retention", "bench.fairness"),
    *("bench.serving", "bench.shared_prefixes", "bench.stalls", "mlx_lm.generate", "mlx_lm.server"),
}
FLAGS_OF_OTHERS = {
    "--kv-cache-quantization",  # vllm-mlx
    "--use-paged-cache",  # rapid-mlx
    "--schema",  # llm
    "--no-binary",  # pip
    "--no-install-recommends",  # apt-get
    "--install",  # xcode-select
    "--now",  # systemctl
    "--version",  # python
    "--python",  # uv
    "--no-build-isolation",  # pip
    "--over",  # mlx.distributed_config
    "--model",  # tests/support/simulation/schedules.py
    "--tokens-target",
    "--faults",
}
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|h|cpp|metal|md|sh|yml|toml))")
PATHS_OF_OTHERS = re.compile(
    r"^/|^(aten|ggml|mlx/backend|vllm_metal|apple_rules|device|gpu|language|opencl|runtime)/"
    r"|^(application/json|extra-openai-models\.yaml|DIR/.*|\.metal|build/.*)$"
)


def named(pattern: str) -> list[tuple[str, str]]:
    """Documents, and what they have in quotes that a pattern matches as a whole."""
    found = re.compile(pattern)
    return [
        (name, span)
        for name, text in DOCUMENTS.items()
        for span in spans(text)
        if found.fullmatch(span)
    ]


def has(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute, or its constructor an argument."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("mlx_paged")]
    return (
        hasattr(kind, name)
        or any(name in inspect.get_annotations(base) for base in own)
        or any(re.search(rf"\bself\.{name}\b", inspect.getsource(base)) for base in own)
    )


def resolves(dotted: str) -> bool:
    """Whether a dotted name leads to something."""
    for root, kind in sorted(OBJECTS.items(), reverse=True):
        if dotted.startswith(f"{root}."):
            return has(kind, dotted.removeprefix(f"{root}.").split(".")[0])
    first, *rest = dotted.split(".")
    module = MODULES[first]
    while rest:
        try:
            module = importlib.import_module(f"{module}.{rest[0]}").__name__
        except ModuleNotFoundError:
            break
        rest.pop(0)
    thing = importlib.import_module(module)
    for name in rest:
        if not hasattr(thing, name):
            return inspect.isclass(thing) and has(thing, name)
        thing = getattr(thing, name)
    return True


def unknown_names(text: str) -> list[str]:
    """Dotted names in quotes that lead nowhere."""
    found = []
    for span in spans(text):
        match = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:[(\[].*)?", span)
        if match is None or match[1] in TOOLS | MADE_BY_PATCHES or FILE.fullmatch(span):
            continue
        first = match[1].split(".")[0]
        if (first in MODULES or first in OBJECTS) and not resolves(match[1]):
            found.append(span)
    return found


def foreign_methods(text: str) -> list[str]:
    """Attributes of a public class that stand after the name of another one, which lacks them."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n- |\n\|", prose(text)):
        kind = None
        for span in re.findall(r"`([^`]+)`", paragraph):
            if match := re.match(r"(?:mlx_paged\.)?([A-Z]\w+)", span):
                kind = CLASSES.get(match[1])
            elif kind and re.fullmatch(r"[a-z]\w*(\(.*\))?", span):
                name = span.split("(")[0]
                owners = [other for other in CLASSES.values() if name in vars(other)]
                if owners and not has(kind, name) and name not in arguments(kind):
                    found.append(f"{kind.__name__}.{name}")
    return found


def arguments(function) -> set[str]:
    return set(inspect.signature(function).parameters)


@cache
def all_arguments() -> frozenset[str]:
    """Of every public class and function, and of their methods."""
    public = [getattr(mlx_paged, name) for name in mlx_paged.__all__]
    methods = [m for kind in CLASSES.values() for m in vars(kind).values() if inspect.isroutine(m)]
    functions = [f for f in public + methods if not isinstance(f, classmethod | staticmethod)]
    return frozenset().union(*(arguments(f) for f in functions if callable(f) and f not in ERRORS))


def test_dotted_names_lead_somewhere():
    assert {name: found for name, text in DOCUMENTS.items() if (found := unknown_names(text))} == {}


def test_methods_belong_to_the_class_that_a_paragraph_speaks_of():
    found = {name: found for name, text in DOCUMENTS.items() if (found := foreign_methods(text))}
    assert found == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`mlx_paged.Motor` runs", ["mlx_paged.Motor"]),
        ("`Engine.explode()` and `Engine.step()`", ["Engine.explode()"]),
        ("`engine.ticks.spikes`, `engine.ticks.peaks`", ["engine.ticks.peaks"]),
        ("`mx.fast.rms_norms`", ["mx.fast.rms_norms"]),
        ("`bench.admissions`", ["bench.admissions"]),
        ("`Completion.prefix_miss`, `Completion.prefix_hit`", ["Completion.prefix_hit"]),
    ],
)
def test_a_wrong_dotted_name_is_found(text, wrong):
    assert unknown_names(text) == wrong


def test_a_method_of_another_class_is_found():
    text = "`EngineService` serves threads. Any thread can call `submit`, `abort` and `call`."
    assert foreign_methods(text) == ["EngineService.abort"]


def test_arguments_exist():
    """``name=value`` alone is an argument of something public; with a class, of that class."""
    others = {"check", "keep"}  # of subprocess.run and mlx-lm's RotatingKVCache
    for name, span in named(r"[a-z]\w*=.*"):
        argument = span.split("=")[0]
        fields = {field.name for field in dataclasses.fields(mlx_paged.SamplingParams)}
        assert argument in all_arguments() | fields | others, (name, span)
    for name, span in named(rf"(?:{'|'.join(CLASSES)})\(.+\)"):
        kind, inside = span.rstrip(")").split("(", 1)
        for argument in re.findall(r"(\w+)=", inside):
            assert argument in arguments(CLASSES[kind]), (name, span)


@cache
def sources(*folders: str) -> str:
    suffixes = {".py", ".cpp", ".h", ".metal", ".in"}
    files = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return "\n".join(path.read_text() for path in files if path.suffix in suffixes)


@pytest.mark.slow
def test_identifiers_and_variables_occur_in_the_sources():
    product = ("mlx_paged", "bench", "scripts", "csrc", "metal", "python")
    words = set(re.findall(r"\w+", sources(*product, "tests")))
    mlx_lm = Path(importlib.import_module("mlx_lm").__file__).parent
    words |= set(re.findall(r"\w+", "".join(p.read_text() for p in mlx_lm.glob("*.py"))))
    for name, span in named(r"[a-z]+(?:_[a-z]+)+|[A-Z]+(?:_[A-Z]+)+(?:=.*)?"):
        assert span.split("=")[0] in words | WORDS_OF_OTHERS, (name, span)
    for name, span in named(r"MLX_PAGED_[A-Z_]+(?:=.*)?"):
        assert re.search(rf"\b{span.split('=')[0]}\b", sources("mlx_paged", "csrc")), (name, span)


WORDS_OF_OTHERS = {
    *("flash_attn_varlen_func", "reshape_and_cache", "allocate_slots"),  # of vLLM
    *("get_computed_blocks", "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "enable_prefix_caching"),
    *("mul_mat", "GGML_NATIVE", "CMAKE_ARGS"),  # llama.cpp and its build
    *("OMP_WAIT_POLICY", "MLX_MAX_MB_PER_BUFFER", "MLX_MAX_OPS_PER_BUFFER", "MLX_METAL_GPU_ARCH"),
    *("OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_SAMPLER"),
    *("OTEL_BSP_MAX_QUEUE_SIZE", "ANTHROPIC_API_KEY"),
    *("ANTHROPIC_MODEL", "OPENAI_MODEL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL", "env_key"),
    *("with_structured_output", "function_calling", "json_mode"),  # langchain
    *(
        "guided_grammar",
        "mlx_paged_kv_disk_hits_total",
        "mlx_paged_prewarm_seconds_total",
    ),  # composed where they are used
}


def commands() -> set[str]:
    """The commands of this repository and of mlx-lm that have flags and that a document names."""
    text = "\n".join(DOCUMENTS.values())
    names = set(re.findall(r"scripts(?:\.[a-z]\w*)+", text))
    files = {name: ROOT / (name.replace(".", "/") + ".py") for name in names}
    parsing = (name for name, file in files.items() if file.exists() and parses(file.read_text()))
    return COMMANDS | {"scripts.drop_in_packages", *parsing}


def parses(source: str) -> bool:
    """Whether a module is a command with a parser."""
    return "__main__" in source and ("parse_args(" in source or "Parser(" in source)


def test_flags_are_those_of_a_command():
    known = frozenset().union(*map(flags, commands())) | FLAGS_OF_OTHERS
    for name, text in DOCUMENTS.items():
        for span in spans(text):
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                assert flag in known, (name, span)


def test_flags_after_a_command_are_its_own():
    for name, span in named(r".*python -m [\w.]+ .*--.*"):
        module, rest = re.search(r"python -m ([\w.]+) (.*)", span).groups()
        if module == "bench.NAME":
            continue
        unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) - flags(module) - {"--help"}
        assert not unknown, (name, span)


def test_files_are_there():
    roots = [ROOT, ROOT / "mlx_paged", ROOT / "docs", ROOT / "scripts", ROOT / "tests"]
    roots += [
        ROOT / "tests/support",
        ROOT / "mlx_paged/drop_in",
        ROOT / "scripts/macos",
        ROOT / "mlx_paged/ops",
    ]
    for name, span in named(FILE.pattern):
        if "/" in span and not PATHS_OF_OTHERS.search(span):
            assert any((root / span).exists() for root in roots), (name, span)


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_to_files_and_headings():
    for name, text in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path if path else ROOT / name
            assert file.exists(), (name, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in map(slug, headings), (name, target)


def test_the_list_of_documents_is_complete():
    listed = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", DOCUMENTS["docs/README.md"], re.MULTILINE)
    here = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert here - {"README.md"} <= set(listed)


def test_the_parsers_are_found():
    assert isinstance(argparse.ArgumentParser(), argparse.ArgumentParser)
    assert "--beams" in flags("mlx_paged.generate") - flags("mlx_paged.doctor")
    assert "--verify" in flags("mlx_paged.kv_disk") and snippets(DOCUMENTS["README.md"], ROOT)
