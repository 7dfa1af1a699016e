"""The model of MLX's cache against MLX's own class, and the allocator's rules one by one."""

import inspect
import subprocess
import textwrap
from random import Random
from types import FunctionType

import pytest

from tests.gpu_memory import allocator as model
from tests.gpu_memory.allocator import PAGE, Allocator, BufferCache
from tests.metal_emulator import require_emulator
from tests.metal_emulator.mlx_headers import mlx_include_dir
from tests.metal_emulator.toolchain import clang


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory):
    """Runs calls on MLX's class; returns what each call found, and the bytes then cached."""
    require_emulator()
    program = tmp_path_factory.mktemp("cache") / "buffer_cache"
    source = str(__file__).replace("test_allocator.py", "buffer_cache.cpp")
    clang("-std=c++20", f"-I{mlx_include_dir()}", source, "-o", str(program))

    def run(calls: list[tuple[str, int]]) -> list[tuple[int, int]]:
        words = "\n".join([str(PAGE), *(f"{verb} {size}" for verb, size in calls)])
        out = subprocess.run([program], input=words, text=True, check=True, capture_output=True)
        lines = out.stdout.splitlines()
        return [(int(found), int(size)) for found, size in map(str.split, lines)]

    return run


def random_calls(seed: int, count: int = 3000) -> list[tuple[str, int]]:
    """Sizes alike enough to be used again; releases of what is cached, or of the oldest buffer."""
    random, cache, calls = Random(seed), BufferCache(), []
    for verb in random.choices(("reuse", "recycle", "release"), (10, 12, 1), k=count):
        size = random.randint(1, 40) * random.choice((1, 100, PAGE // 2))
        if verb == "release":
            share = random.choice((0.3, 0.92, 1.0))
            size = random.choice((int(share * cache.size), *[*cache._by_age.values()][:1]))
        getattr(cache, verb)(size)
        calls.append((verb, size))
    return calls


def modelled(calls: list[tuple[str, int]]) -> list[tuple[int, int]]:
    cache, seen = BufferCache(), []
    for verb, size in calls:
        found = getattr(cache, verb)(size)
        seen.append((found or 0 if verb == "reuse" else 0, cache.size))
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_the_cache_answers_as_mlxs_class(real_cache, seed):
    calls = random_calls(seed)
    assert modelled(calls) == real_cache(calls)


RULES = {
    "2 * size, ": "3 * size, ",
    "size + 2 * self.page": "size + 3 * self.page",
    "bisect_left(self._by_size, (size, -1))": "bisect_left(self._by_size, (size + 1, -1))",
    "0.9 * self.size": "0.95 * self.size",
    "next(iter(self._by_age.items()))": "next(reversed(self._by_age.items()))",
    "released < least": "released <= least",
}


@pytest.mark.parametrize("rule", RULES)
def test_a_changed_rule_is_noticed(real_cache, monkeypatch, rule):
    for name, function in vars(BufferCache).copy().items():
        if isinstance(function, FunctionType) and rule in (text := inspect.getsource(function)):
            changed = textwrap.dedent(text.replace(rule, RULES[rule]))
            scope = vars(model).copy()
            exec(changed, scope)
            monkeypatch.setattr(BufferCache, name, scope[name])
    calls = random_calls(0)
    assert modelled(calls) != real_cache(calls)


def test_sizes_above_a_page_are_whole_pages():
    allocator = Allocator()
    assert [allocator.malloc(size) for size in (5, PAGE, PAGE + 1)] == [5, PAGE, 2 * PAGE]


def test_the_limit_holds_back_what_is_freed_and_what_was_kept():
    allocator = Allocator(cache_limit=10 * PAGE)
    sizes = [allocator.malloc(size * PAGE) for size in (4, 4, 4, 4)]
    for size in sizes:
        allocator.free(size)
    assert allocator.cache.size == 12 * PAGE  # the last one found the limit exceeded
    allocator.malloc(PAGE)  # not from the cache: 4 pages are too many
    assert allocator.cache.size == 8 * PAGE and allocator.num_new == 5


def test_under_pressure_a_new_buffer_gives_cached_ones_back():
    allocator = Allocator(gc_limit=20 * PAGE)
    for size in [allocator.malloc(size * PAGE) for size in (5, 6, 7)]:
        allocator.free(size)
    allocator.malloc(10 * PAGE)
    assert allocator.cache.size == 7 * PAGE and allocator.active == 10 * PAGE
