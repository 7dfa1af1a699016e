"""Requests with adapters on several ranks, as a command: prints what each request got, and of which
folder's adapter."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import Completion, Engine
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.ranks import joined
from tests.support.engine.rank_runs import TRACE, model_of

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 160, "prefill_chunk": 16}
FOLDERS = "a0", "a1", "a2", "a3"
TOKENS = 6
RECOVERED = "a runner begins again"
PROMPTS = [[token % 60 for token in prompt] for prompt in TRACE]


def quantized(model: nn.Module) -> nn.Module:
    """In 4 bits, as far as a half of each layer can be."""
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 64 == 0,
    )
    return model


def base_of(name: str) -> nn.Module:
    name, _, how = name.partition("/")
    model = model_of(name)
    return quantized(model) if how == "4bit" else model


class Run:
    """An engine, and what its requests got.

    Attributes:
        found: prompt, folder of the adapter, tokens and what else is said of each request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found: list[dict[str, Any]] = []
        self.done: dict[int, Completion] = {}
        self._asked: dict[int, tuple[list[int], str | None]] = {}

    def add(self, prompt: list[int], adapter: str | None, folder: str | None, **options: Any):
        options = {"max_tokens": TOKENS} | options
        number = self.engine.add_request(prompt, adapter=adapter, **options)
        self._asked[number] = prompt, folder
        return number

    def fork(self, parent: int, suffix: list[int]) -> int:
        prompt, folder = self._asked[parent]
        whole = prompt + self.done[parent].tokens + suffix
        number = self.engine.fork(parent, suffix, max_tokens=TOKENS)
        self._asked[number] = whole, folder
        return number

    def step(self, count: int = 1_000_000) -> None:
        for _ in range(count):
            if not self.engine.has_work:
                break
            for output in self.engine.step():
                if output.completion is not None:
                    self._end(output.request_id, output.completion)

    def _end(self, number: int, completion: Completion) -> None:
        self.done[number] = completion
        prompt, folder = self._asked[number]
        error = None if completion.error is None else str(completion.error)
        self.found.append(
            {"prompt": prompt, "folder": folder, "tokens": completion.tokens, "error": error}
            | {"cached": completion.cached_prompt_tokens}
        )


def mixed(run: Run, root: Path) -> None:
    """Rows of all adapters together; loads, an unload and an update between steps; forks."""
    engine, names = run.engine, [None, "a0", "a1"]
    for number, prompt in enumerate(PROMPTS):
        run.add(prompt, names[number % 3], names[number % 3])
    run.step(3)
    engine.load_adapter("late", root / "a2")
    for prompt in PROMPTS[:2]:
        run.add(prompt, "late", "a2")
    run.step(2)
    running = run.add(PROMPTS[3], "a0", "a0", max_tokens=12)
    kept = run.add(PROMPTS[4], "a1", "a1", keep=True)
    run.step(2)
    engine.unload_adapter("a0")
    arrays = mx.load(str(root / "a3" / "adapters.safetensors"))
    engine.update_adapter("a1", arrays, scale=4.0)  # the rows under way have what was before
    run.add(PROMPTS[4], "a1", "a3")
    run.step()
    assert running in run.done
    ended = run.add(PROMPTS[5], "a1", "a3", max_tokens=30)
    run.step(5)
    engine.update_adapter("a1", arrays, scale=4.0, end_requests=True)
    run.step()
    assert run.done[ended].finish_reason == "abort"
    run.fork(kept, [4])
    run.fork(kept, [9, 9])
    run.step()
    engine.release(kept)


def prefixes(run: Run, root: Path) -> None:
    """One prompt with two adapters, twice with each, and without one."""
    for name in ("a0", "a1", "a0", "a1", None):
        run.add(PROMPTS[2], name, name)
        run.step()


def evicted(run: Run, root: Path) -> None:
    """More adapters in turn than the memory takes; one whose file has changed meanwhile, then is
    missing, then is what it was."""
    for _ in range(2):
        for name in FOLDERS:
            run.add(PROMPTS[1], name, name)
            run.step()
    path = root / "a0" / "adapters.safetensors"
    arrays, content = mx.load(str(path)), path.read_bytes()
    mx.eval(arrays)
    mx.save_safetensors(str(path), {name: 2 * each for name, each in arrays.items()})
    for _ in ("changed", "missing"):
        run.add(PROMPTS[0], None, None, max_tokens=20)
        run.add(PROMPTS[3], "a3", "a3", max_tokens=20)
        run.step(5)
        run.add(PROMPTS[2], "a0", None)
        run.step()
        path.unlink(missing_ok=True)
    path.write_bytes(content)
    run.add(PROMPTS[2], "a0", "a0")
    run.step()


def random(run: Run, root: Path) -> None:
    """Requests at random with adapters that come, change, go and do not all fit into the memory."""
    engine, rng = run.engine, np.random.default_rng(5)
    folders: dict[str, str] = {name: name for name in FOLDERS}  # by the adapter's name
    for number in range(48):
        names = [None, *folders]
        name = names[rng.integers(len(names))]
        prompt = PROMPTS[number % 3][: rng.integers(6, 30)] + rng.integers(1, 60, 3).tolist()
        options = {"max_tokens": int(rng.integers(1, 9))}
        run.add(prompt, name, None if name is None else folders[name], **options)
        run.step(int(rng.integers(3)))
        other, folder = (FOLDERS[i] for i in rng.integers(len(FOLDERS), size=2))
        match rng.integers(8):
            case 0:
                engine.load_adapter(other, root / folder)
                folders[other] = folder
            case 1:
                arrays = mx.load(str(root / folder / "adapters.safetensors"))
                engine.update_adapter(other, arrays, scale=4.0)
                folders[other] = folder
            case 2 if other in folders:
                engine.unload_adapter(other)
                del folders[other]
    run.step()
    for _ in range(2):
        (first, *_), *others = engine.sample(PROMPTS[:2], n=2, max_tokens=4, adapter=min(folders))
        assert len(others) == 1 and first.adapter == min(folders)


SCENARIOS = {"mixed": mixed, "prefixes": prefixes, "evicted": evicted, "random": random}


def tell_recoveries() -> None:
    """Let each runner of this process write a line when it begins again."""
    recover = ModelRunner.recover

    def told(self: ModelRunner, error: BaseException | None = None) -> None:
        print(RECOVERED, file=sys.stderr)
        recover(self, error)

    ModelRunner.recover = told  # type: ignore[method-assign]


def main(name: str, folder: str, *wanted: str) -> None:
    tell_recoveries()
    model, root = joined(base_of(name)), Path(folder)
    result: dict[str, Any] = {}
    for each in wanted:
        scenario, _, how = each.partition(":")
        names = FOLDERS if scenario in ("evicted", "random") else FOLDERS[:2]
        memory = {"adapter_memory": int(how)} if how.isdecimal() else {}
        engine = Engine(
            model,
            adapters={name: root / name for name in names},
            compile=how == "compiled",
            **OPTIONS,
            **memory,
        )
        run = Run(engine)
        SCENARIOS[scenario](run, root)
        engine.manager.check_integrity()
        metrics = engine.metrics()
        result[each] = {"found": run.found, "leaks": engine.manager.blocks_in_use} | {
            "way": engine.manager.way,
            "loads": engine._models.adapters.loads,
            "ranks": (metrics["ranks"] or {}).get("count"),
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
