"""Features stay in their homes, fields keep their writers, and rooms keep their internals.

The numbers are those of ``python -m scripts.leaks``; with ``--files`` it names the files. None may
grow. Whoever makes one smaller writes the smaller number here.
"""

from collections.abc import Mapping

import pytest

from scripts.leaks import FEATURES, SEQUENCES, Sources, feature_counts, main

CORE = {
    "drafts": 3,
    "beyond": 2,
    "further": 1,
    "grammars": 2,
    "disk": 3,
    "images": 3,
    "ranks": 1,
    "beams": 3,
    "profiling": 1,
    "kv_bits": 3,
    "states": 3,
    "windows": 3,
    "cascade": 2,
    "compiled": 3,
}
"""By feature, the number of core files outside its home that know the feature."""

ADAPTERS = {
    "drafts": 8,
    "beyond": 0,
    "further": 0,
    "grammars": 5,
    "disk": 4,
    "images": 18,
    "ranks": 3,
    "beams": 5,
    "profiling": 5,
    "kv_bits": 8,
    "states": 5,
    "windows": 9,
    "cascade": 5,
    "compiled": 4,
}
"""The same of rooms that are not the core: what users call, and what is reported to them."""

WRITERS = {
    "admitted_time": 1,
    "arrival_time": 1,
    "error": 6,
    "constraint": 1,
    "finish_reason": 1,
    "finish_time": 1,
    "first_entries": 1,
    "first_token_time": 1,
    "hashes": 2,
    "id": 0,
    "is_reusable": 1,
    "keep_blocks": 1,
    "known_keys": 0,
    "logprobs": 1,
    "is_background": 0,
    "num_cached": 1,
    "num_charged": 1,
    "num_computed": 1,
    "num_faults": 2,
    "num_in_flight": 1,
    "num_overtaken": 1,
    "num_preempted": 1,
    "num_prompt": 0,
    "num_tokens": 2,
    "params": 1,
    "pinned": 1,
    "prefix_miss": 1,
    "priority": 0,
    "private_start": 2,
    "private_stop": 2,
    "prompt": 0,
    "prompt_logprobs": 3,
    "root": 0,
    "reported": 1,
    "row": 1,
    "salt": 0,
    "samples": 3,
    "seed": 0,
    "share": 0,
    "states": 1,
    "tokens": 1,
    "top_logprobs": 1,
    "turn_ends": 0,
    "variant": 1,
}
"""By field of a sequence, the number of files that write the field."""

INTERNALS = {
    "private": 0,
    "scheduler": 0,
    "allocator": 37,
}
"""Reads of another room's internals: underscores, the scheduler's, the allocator's."""


def problems(counted: Mapping[str, int], recorded: Mapping[str, int]) -> list[str]:
    """What is wrong with some counts: those that have grown, and records that are too high."""
    return [
        f"{name}: {counted.get(name, 0)}, was {recorded.get(name, 0)}: "
        + (
            "it has grown, see python -m scripts.leaks --files"
            if counted.get(name, 0) > recorded.get(name, 0)
            else "write the lower number into tests/project/test_leaks.py"
        )
        for name in sorted(counted.keys() | recorded.keys())
        if counted.get(name, 0) != recorded.get(name, 0)
    ]


@pytest.fixture(scope="module")
def package() -> Sources:
    return Sources.of_package()


@pytest.fixture
def planted(package) -> Sources:
    """A package of two files, to which a test adds one with a leak."""
    return Sources({path: package.modules[path] for path in SEQUENCES.values()})


def sizes(places: Mapping[str, set[str]]) -> dict[str, int]:
    return {name: len(each) for name, each in places.items()}


def test_no_feature_is_known_to_more_files(package):
    counts = feature_counts(package)
    assert problems({name: core for name, (core, _) in counts.items()}, CORE) == []
    assert problems({name: others for name, (_, others) in counts.items()}, ADAPTERS) == []


def test_no_field_of_a_sequence_has_more_writers(package):
    assert problems(sizes(package.writers), WRITERS) == []


def test_nothing_writes_a_step_that_is_planned(package):
    assert package.step_writes == set()


def test_no_room_reads_more_of_another_room(package):
    assert problems(sizes(package.internals), INTERNALS) == []


def test_homes_are_files_of_the_package(package):
    for feature in FEATURES.values():
        for home in (*feature.home, *feature.at_home):
            assert any(file == home or file.startswith(f"{home}/") for file in package.modules)


REQUEST = """
class Request:
    tokens: list[int]
    num_computed: int = 0

    def advance(self, num_computed):
        self.num_computed = num_computed
"""


KNOWS_DRAFTS = {
    "an import of a home": "from mlx_paged.scheduler.ngram import MOST",
    "an import of a home as a module": "from mlx_paged.scheduler import ngram",
    "a name": "num_drafts = 3",
    "an attribute": "print(span.drafts)",
    "an argument": "def propose(draft_model): ...",
    "a keyword": "Engine(speculate='yes')",
    "a class": "class DraftTree: ...",
    "an attribute by its name": "getattr(span, 'drafts')",
    "a flag": "parser.add_argument('--num-draft-tokens')",
}


@pytest.mark.parametrize("code", KNOWS_DRAFTS.values(), ids=KNOWS_DRAFTS)
@pytest.mark.parametrize(("path", "index"), [("kv/planted.py", 0), ("server/planted.py", 1)])
def test_a_planted_leak_of_a_feature_is_counted(planted, code, path, index):
    before = feature_counts(planted)["drafts"]
    after = feature_counts(planted.with_file(path, code))["drafts"]
    assert after[index] == before[index] + 1
    assert feature_counts(planted.with_file("scheduler/ngram.py", code))["drafts"] == before


WRITES = {
    "an assignment": "request.num_computed = 3",
    "one of several": "request.num_computed, other = 3, 4",
    "an addition": "self.request.num_computed += 1",
    "setattr": "setattr(request, 'num_computed', 3)",
    "a copy with another value": "replace(request, num_computed=3)",
    "a call of a method that only writes it": "request.advance(3)",
    "a loop": "for request.num_computed in range(3): ...",
}


@pytest.mark.parametrize("code", WRITES.values(), ids=WRITES)
def test_a_planted_write_is_counted(planted, code):
    before = planted.with_file("request.py", REQUEST)
    after = before.with_file("engine/planted.py", code)
    assert problems(sizes(after.writers), sizes(before.writers)) == [
        "num_computed: 1, was 0: it has grown, see python -m scripts.leaks --files"
    ]


@pytest.mark.parametrize(
    "code",
    [
        "request.tokens.append(3)",
        "request.tokens[1] = 3",
        "request.tokens[4:] = []",
        "del r.tokens[0]",
    ],
)
def test_a_planted_change_of_a_list_is_counted(planted, code):
    assert planted.with_file("engine/planted.py", code).writers["tokens"] == {"engine/planted.py"}


@pytest.mark.parametrize(
    "code", ["x = request.num_computed", "self.num_computed = 3", "f(tokens=3)"]
)
def test_what_writes_no_field_is_not_counted(planted, code):
    writers = planted.with_file("engine/planted.py", code).writers
    assert sizes(writers) == sizes(planted.writers)


WRITES_OF_STEPS = {
    "a span": "span.start = 3",
    "a span of a step": "step.spans[0].start += 3",
    "a list of a step": "report.step.copies.append(copy)",
    "a step": "current_step.is_held_back = True",
    "a copy with another value": "replace(piece, stored=3)",
}


@pytest.mark.heavy
@pytest.mark.parametrize("code", WRITES_OF_STEPS.values(), ids=WRITES_OF_STEPS)
def test_a_planted_write_of_a_step_is_found(package, code):
    """So it is in a method of a span itself."""
    assert len(package.with_file("runner/planted.py", code).step_writes) == 1
    own = "class Span:\n    start: int\n    def move(self): self.start = 3"
    assert package.with_file("scheduler/step.py", own).step_writes == {"scheduler/step.py:3:start"}


READS = {
    "an underscore": ("private", "print(scheduler._most_running)"),
    "an underscore of any object": ("private", "print(thing._only_the_scheduler_has)"),
    "an import with an underscore": ("private", "from mlx_paged.scheduler.places import _sorted"),
    "an attribute of the scheduler": ("scheduler", "print(self._scheduler.running)"),
    "one of the engine's scheduler": ("scheduler", "print(engine.scheduler.tier.loading)"),
    "the allocator's store": ("allocator", "print(model.allocator.store)"),
}


@pytest.mark.parametrize(("kind", "code"), READS.values(), ids=READS)
def test_a_planted_read_of_internals_is_counted(planted, kind, code):
    own = "self._most_running = self._only_the_scheduler_has = 1"
    before = planted.with_file("scheduler/places.py", own)
    after = before.with_file("server/planted.py", code)
    grown = f"{kind}: 1, was 0: it has grown, see python -m scripts.leaks --files"
    assert grown in problems(sizes(after.internals), sizes(before.internals))


def test_what_a_room_reads_of_its_own_is_not_counted(planted):
    code = "self._waiting = 1\nprint(self._waiting, scheduler.tier, scheduler._waiting)"
    assert sizes(planted.with_file("scheduler/planted.py", code).internals) == sizes(
        planted.internals
    )


def test_a_record_that_is_too_high_is_a_problem():
    [problem] = problems({"drafts": 2}, {"drafts": 3})
    assert "write the lower number" in problem


@pytest.mark.heavy
def test_the_script_prints_the_numbers(capsys):
    main(["--files"])
    lines = capsys.readouterr().out.splitlines()
    assert f"  drafts: {CORE['drafts']} core, {ADAPTERS['drafts']} others" in lines
    assert f"  num_computed: {WRITERS['num_computed']}" in lines
    assert f"  scheduler: {INTERNALS['scheduler']}" in lines
    assert "    scheduler/scheduler.py" in lines
