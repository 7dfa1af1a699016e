"""Which files know a feature, write a field of a sequence, or read what belongs to another room.

    python -m scripts.leaks [--files]

Prints four tables: the features, each with the files outside its home that know the feature; the
fields of a sequence, each with the files that write the field; the writes of a step's fields; and
the reads of internals, by kind.
The numbers are those that ``tests/project/test_leaks.py`` does not let grow.
"""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import mlx_paged

PACKAGE = Path(mlx_paged.__file__).parent

Where = Mapping[str, set[str]]
"""Places in the package by feature, field or kind: files, or lines of files."""

ADAPTERS = {
    *("server", "protocol", "generate", "terminal", "batch_generator", "drop_in"),
    *("doctor", "metrics"),
    "options",
}
"""Rooms with a count of their own; all other rooms and modules are the core."""


@dataclass(frozen=True)
class Feature:
    """A feature, and by what a file shows that the file knows the feature.

    Attributes:
        home: files and folders; a file that imports one of them knows the feature.
        words: patterns of names, attributes, arguments and flags.
        at_home: further files and folders that may know the feature; they may be imported.
    """

    home: tuple[str, ...]
    words: tuple[str, ...]
    at_home: tuple[str, ...] = ()

    def is_home(self, file: str) -> bool:
        return any(_is_in(file, place) for place in (*self.home, *self.at_home))


FEATURES = {
    "drafts": Feature(
        (
            *("scheduler/speculation.py", "scheduler/ngram.py", "runner/draft_model.py"),
            *("scheduler/acceptance.py", "scheduler/pace.py"),
            *("runner/pooled_drafter.py", "runner/head_drafter.py", "runner/head_model.py"),
            *("runner/kept_states.py", "runner/drafting.py"),
        ),
        ("*draft*", "*speculat*", "*ngram*", "num_accepted", "*proposal*"),
        at_home=("scheduler/progress.py", "heads", "doctor/acceptance.py"),
    ),
    # Tokens after a request's own, for which the sampler has rows. Who guessed them it cannot know.
    "beyond": Feature(("sampling/penalties.py",), ("*beyond*",)),
    # The same tokens in a span of a step: neither the step nor a runner knows who guessed them.
    "further": Feature(
        (),
        ("further",),
        at_home=("scheduler/progress.py", "scheduler/speculation.py", "runner/kept_states.py"),
    ),
    "grammars": Feature(
        ("sampling/grammar.py", "sampling/grammar_trials.py"),
        ("*grammar*", "forced_after", "*fast_forward*"),
        ("formats/grammar.py",),
    ),
    "disk": Feature(("kv_disk",), ("*tier*", "*disk*"), at_home=("scheduler/tier.py",)),
    "images": Feature(
        ("vision",),
        ("*image*", "*sight*", "*eyes*", "*vision*", "seen_keys", "SeenPrompt"),
        at_home=("prompt.py",),
    ),
    "ranks": Feature(
        ("runner/ranks.py", "runner/links.py", "runner/plan.py"),
        ("ranks", "rank_*", "*_rank", "*_ranks", "LeadingRunner", "LostRank", "begins_each"),
        at_home=("launched.py",),
    ),
    "beams": Feature(("engine/beams.py",), ("*beam*", "synchronous")),
    "profiling": Feature(("runner/profiling.py",), ("*profiling*", "*phase*")),
    "kv_bits": Feature(
        ("ops/formats.py",),
        ("*kv_bits*", "*KVBits*", "checked_bits", "*scales*", "quantized"),
        at_home=("kv", "ops"),
    ),
    "states": Feature(
        (
            "runner/recurrent_states.py",
            "runner/recurrent_rows.py",
            "runner/stored_states.py",
            "kv/snapshots.py",
            "kv/states.py",
            "kv/state_ends.py",
            "kv/snapshot_plan.py",
            "kv/snapshot_memory.py",
            "runner/state_profile.py",
        ),
        (
            *("*recurrent*", "*snapshot*", "*stateful*", "state_bytes", "*without_state"),
            *("*behind*", "rewinds", "restores", "catch_up", "keep_state", "advance_each"),
            *("adopt_state", "state_after", "state_key"),
        ),
        at_home=("scheduler/progress.py", "ops/cpu_recurrent.py"),
    ),
    "windows": Feature(
        (),
        ("*window*",),
        at_home=(
            *("kv/layer_groups.py", "kv/layer_kinds.py", "attention/causal.py"),
            "heads/eagle3.py",
        ),
    ),
    "cascade": Feature((), ("*cascade*", "shared_keys"), at_home=("attention",)),
    "compiled": Feature(
        ("runner/compiled_decode.py",),
        ("CompiledDecode", "compile_decodes", "*padding*", "why_plain", "traces", "untraceable"),
    ),
}

SEQUENCES = {"Request": "request.py", "SequenceBlocks": "kv/block_tables.py"}
"""Classes whose fields are those of a sequence, and their files."""

NOT_PRIVATE = {"_", "_replace", "_asdict", "_fields", "_make"}
"""Names that begin with an underscore and are public: those of named tuples."""

OTHERS = {"params", "completion", "delta", "deltas", "parts", "_recording"}
"""Names of objects that have fields with the names of a sequence's."""

STEP_CLASSES = {"Step": "scheduler/step.py", "Span": "scheduler/step.py"}
"""Classes whose fields nothing writes once a step is planned, and their files."""

STEPS = re.compile(r"(.*_)?(steps?|spans?|piece)")
"""Names of objects of these classes."""

MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
    *("add", "update", "discard", "setdefault", "popitem", "popleft", "appendleft"),
}
"""Methods of containers that change the container."""

VERBS = {
    "scheduler": {
        *("add", "check_fits", "schedule", "commit", "complete", "recover", "clear", "fork"),
        *("begun", "settle", "foresee", "copies_done", "take_released", "take_rested", "discard"),
        *("forget_cached", "leave_tier", "park", "unpark", "release", "levels", "ahead_of"),
        *("blocks_in_use", "gives_several", "has_tier", "tier_metrics", "refcount_histogram"),
        *("copies_when_idle", "has_more_copies", "keep_copies"),
        *("pin", "forget", "forget_kept", "holdings", "least_blocks", "blocks_needed", "shrink"),
        *("grow", "num_blocks", "clock"),
    }
}
"""What other rooms may call of an object; all else of the object is internal to its room."""

INTERNALS = {"allocator": {"store", "prefixes", "block_tables", "snapshots"}}
"""Attributes of an object, by the object's name, that are internal to its room."""

OWNERS = {"scheduler": "scheduler", "allocator": "kv", "pool": "kv", "runner": "runner"} | {
    name: name for name in ("engine", "metrics", "sampling")
}
"""Rooms of objects, by the objects' names."""


class Sources:
    """The modules of the package, parsed.

    Args:
        modules: by path relative to the package.
    """

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.modules = modules
        self._nodes = {path: list(ast.walk(tree)) for path, tree in modules.items()}

    @classmethod
    def of_package(cls) -> "Sources":
        paths = sorted(PACKAGE.rglob("*.py"))
        return cls({p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text()) for p in paths})

    def with_file(self, path: str, code: str) -> "Sources":
        """The same with one file more, or another text of a file."""
        return Sources({**self.modules, path: ast.parse(code)})

    def without(self, path: str) -> "Sources":
        return Sources({name: tree for name, tree in self.modules.items() if name != path})

    @cached_property
    def names(self) -> dict[str, set[str]]:
        """What each file calls things by: names, attributes, arguments, flags."""
        return {path: set(_names(nodes)) for path, nodes in self._nodes.items()}

    # Features

    def knowing(self, feature: Feature) -> set[str]:
        """The files outside a feature's home that know the feature."""
        word = re.compile("|".join(feature.words).lower().replace("*", ".*"))
        return {
            path
            for path, nodes in self._nodes.items()
            if not feature.is_home(path)
            and (
                any(word.fullmatch(name) for name in self.names[path])
                or any(_is_in(each, home) for each in _imported(nodes) for home in feature.home)
            )
        }

    # Fields

    @cached_property
    def sequence_fields(self) -> set[str]:
        """The fields of the classes :data:`SEQUENCES`."""
        return self._fields_of(SEQUENCES)

    def _fields_of(self, classes: Mapping[str, str]) -> set[str]:
        return {
            node.target.id
            for name, path in classes.items()
            if path in self.modules
            for each in self.modules[path].body
            if isinstance(each, ast.ClassDef) and each.name == name
            for node in each.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    @cached_property
    def step_writes(self) -> set[str]:
        """Writes of a field of a step or of a span, as lines of files. To make a step is none."""
        fields = self._fields_of(STEP_CLASSES)
        return {
            f"{path}:{node.lineno}:{field}"
            for path, nodes in self._nodes.items()
            if room_of(path) != "drop_in"  # its steps are others
            for node, is_own in _with_methods_of(STEP_CLASSES, nodes)
            for owner, field in _attribute_writes(node)
            if field in fields and (STEPS.fullmatch(owner) or (owner == "self" and is_own))
        }

    @cached_property
    def writers(self) -> dict[str, set[str]]:
        """The files that write each field of a sequence. Who calls a function that does nothing
        else than to write a field writes the field."""
        setters = {
            name: fields for nodes in self._nodes.values() for name, fields in self._setters(nodes)
        }
        found: dict[str, set[str]] = {name: set() for name in sorted(self.sequence_fields)}
        for path, nodes in self._nodes.items():
            for node in nodes:
                for name in self._written(node):
                    found[name].add(path)
                if isinstance(node, ast.Call):
                    for name in setters.get(_last_name(node.func), ()):
                        found[name].add(path)
        return found

    def _setters(self, nodes: Sequence[ast.AST]) -> Iterator[tuple[str, set[str]]]:
        """Functions of a module whose every statement writes fields of a sequence, by name."""
        own = {
            method
            for node in nodes
            if isinstance(node, ast.ClassDef) and node.name in SEQUENCES
            for method in node.body
        }
        for node in nodes:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            written = [set(self._written(statement, node in own)) for statement in body]
            if written and all(written):
                yield node.name, set[str]().union(*written)

    def _written(self, node: ast.AST, of_self: bool = False) -> Iterator[str]:
        """The fields of a sequence that a node writes. The attributes of ``self`` are such fields
        with `of_self` only."""
        for owner, field in _attribute_writes(node):
            is_other = owner in OTHERS or (owner == "self" and not of_self)
            if field in self.sequence_fields and not is_other:
                yield field

    # Internals

    @cached_property
    def internals(self) -> dict[str, set[str]]:
        """Reads of what belongs to another room, by kind, as lines of files."""
        found: dict[str, set[str]] = {"private": set(), "scheduler": set(), "allocator": set()}
        owned, everywhere = self._private_names()
        for path, nodes in self._nodes.items():
            room = room_of(path)
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.module:
                    parts = node.module.split(".")
                    if parts[0] == "mlx_paged" and len(parts) > 1 and parts[1] != room:
                        names = [alias.name for alias in node.names if _is_private(alias.name)]
                        found["private"].update(f"{path}:{node.lineno}:{name}" for name in names)
                if not isinstance(node, ast.Attribute):
                    continue
                owner, where = _last_name(node.value).lstrip("_"), f"{path}:{node.lineno}:"
                if _is_private(node.attr) and node.attr in everywhere:
                    is_foreign = OWNERS.get(owner, room) != room
                    if is_foreign or node.attr not in owned[room]:
                        found["private"].add(where + node.attr)
                if owner in VERBS and OWNERS[owner] != room and node.attr not in VERBS[owner]:
                    found[owner].add(where + node.attr)
                if owner in INTERNALS and OWNERS[owner] != room and node.attr in INTERNALS[owner]:
                    found[owner].add(where + node.attr)
        return found

    def _private_names(self) -> tuple[dict[str, set[str]], set[str]]:
        """Private names that each room defines, and all of them."""
        owned: dict[str, set[str]] = defaultdict(set)
        for path, nodes in self._nodes.items():
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                    name = node.name
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    if _last_name(node.value) not in ("self", "cls"):
                        continue
                    name = node.attr
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    name = node.id
                else:
                    continue
                if _is_private(name):
                    owned[room_of(path)].add(name)
        return owned, set[str]().union(*owned.values())


def room_of(path: str) -> str:
    return PurePosixPath(path).parts[0].removesuffix(".py")


def in_core(files: Iterable[str]) -> set[str]:
    return {file for file in files if room_of(file) not in ADAPTERS}


def feature_counts(sources: Sources) -> dict[str, tuple[int, int]]:
    """By feature, the numbers of core files and of adapters outside its home that know it."""
    counts = {}
    for name, feature in FEATURES.items():
        files = sources.knowing(feature)
        num_core = len(in_core(files))
        counts[name] = num_core, len(files) - num_core
    return counts


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NOT_PRIVATE


def _is_in(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/") or file == f"{place}.py"


def _last_name(node: ast.AST) -> str:
    """``c`` of the expressions ``c``, ``b.c``, ``b.c()`` and ``b.c[0]``; "" of others."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _last_attribute(node: ast.AST) -> str:
    """``c`` of ``b.c``; "" of other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else ""


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """What a node writes: targets of assignments, deleted items, changed containers."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from _elements(target)
    elif isinstance(node, ast.AugAssign | ast.NamedExpr | ast.AnnAssign | ast.For):
        if not isinstance(node, ast.AnnAssign) or node.value is not None:
            yield from _elements(node.target)
    elif isinstance(node, ast.Call) and _last_attribute(node.func) in MUTATORS:
        assert isinstance(node.func, ast.Attribute)
        yield node.func.value


def _attribute_writes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The attributes that a node writes, each with the name of the attribute's object. For
    ``replace`` this is the object that is copied."""
    if isinstance(node, ast.Expr):
        node = node.value
    for target in _targets(node):
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            yield _last_name(target.value), target.attr
    if isinstance(node, ast.Call) and _last_name(node.func) in ("setattr", "replace"):
        given = [keyword.arg for keyword in node.keywords if keyword.arg]
        given += [str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)]
        for name in given:
            yield _last_name(node.args[0]), name


def _with_methods_of(
    classes: Collection[str], nodes: Sequence[ast.AST]
) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """Statements and expressions of a module, and whether each is in one of some classes."""
    own = {
        inner
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.name in classes
        for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.stmt | ast.expr):
            yield node, node in own


def _elements(target: ast.AST) -> Iterator[ast.AST]:
    """The targets that a target of an assignment consists of."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _elements(element)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    """What a module imports of the package, as paths: ``kv/pool.py`` for ``mlx_paged.kv.pool``."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    own = (name.removeprefix("mlx_paged.") for name in names if name.startswith("mlx_paged."))
    return {f"{name.replace('.', '/')}.py" for name in own}


def _names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """All names of a module in lower case. A string that could be a name or a flag is one."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id.lower()
        elif isinstance(node, ast.Attribute):
            yield node.attr.lower()
        elif isinstance(node, ast.arg | ast.keyword):
            yield (node.arg or "").lower()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name.lower()
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2].lower()
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[-\w]+", str(node.value)):
            yield str(node.value).lstrip("-").replace("-", "_").lower()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="name the files, too")
    args = parser.parse_args(arguments)
    sources = Sources.of_package()
    known: Where = {name: sources.knowing(feature) for name, feature in FEATURES.items()}
    for title, where in [
        ("files that know a feature", known),
        ("files that write a field of a sequence", sources.writers),
        ("writes of a step outside planning", {"step": sources.step_writes}),
        ("reads of internals of another room", sources.internals),
    ]:
        print(title)
        for name, places in where.items():
            count = str(len(places))
            if where is known:
                num_core = len(in_core(places))
                count = f"{num_core} core, {len(places) - num_core} others"
            print(f"  {name}: {count}")
            if args.files:
                for place in sorted(places):
                    print(f"    {place}")


if __name__ == "__main__":
    main()
