"""Injects faults into stored K/V and the calls that read and write it, and checks every token.

    python -m scripts.kv_disk_faults [--faults 10000] [--seed 0]

Each life of an engine starts on a directory that was damaged since the life before, or meets calls
that fail. Every prompt must get the tokens and log-probabilities that it gets without a disk. The
last line is one JSON object with what was counted; the status is 1 if anything was wrong.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_paged import Engine
from mlx_paged.cli import COUNT, Parser
from mlx_paged.kv_disk import packs, store
from tests.support.models.architectures import VOCAB, build

CLOSE = 1e-3
"""Log-probabilities may differ by so much: a prompt's chunks are others if a part of it is read."""
PROMPTS, LENGTH, OUTPUT = 6, 72, 3
PER_LIFE = 8
"""Records that one life finds damaged."""

WRITER = """
import sys
import numpy as np
from mlx_paged.kv_disk.packs import PackFiles, allow_disk
allow_disk()
files = PackFiles(sys.argv[1], 10**9)
known = [found for found in files.scan() if not isinstance(found, str)]
print("ready", flush=True)
while True:
    for identity, key, place in known:
        rows = np.empty((1, place.num_bytes), np.uint8)
        if any(files.read([(key, place, 0)], {place.num_bytes: rows}, identity)):
            identity, rows = bytes(32), np.zeros((1, 1000), np.uint8)
        files.append(identity, key, rows[0])
"""
"""Writes what is there once more, until it is killed."""

Outputs = list[tuple[list[int], list[float]]]


class Vocabulary:
    """A tokenizer with one token, whose texts are empty."""

    eos_token_ids = frozenset[int]()
    last_segment = ""

    def __init__(self, token: str) -> None:
        self.token = token
        self.detokenizer = self

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    def get_vocab(self) -> dict[str, int]:
        return {self.token: 0}


class Faults:
    """Lives of engines on one directory, each with a fault of its own kind.

    Attributes:
        faults: how many were injected, by kind.
        wrong: lives with wrong tokens or an exception, by kind.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        rng = self.rng
        self.prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(PROMPTS)]
        # A block of 11,264 bytes has several rows that are added up, and a rest.
        self.model, self.other = (build("llama", num_hidden_layers=11) for _ in range(2))
        self.other.update(tree_map(lambda a: a * 1.01, self.other.parameters()))
        mx.eval(self.other.parameters())
        self.directory = Path(tempfile.mkdtemp(prefix="kv_disk_faults"))
        self.foreign = Path(tempfile.mkdtemp(prefix="kv_disk_faults"))
        self.expected = {id(m): self.outputs(m, None) for m in (self.model, self.other)}
        self.outputs(self.other, self.foreign)

    def close(self) -> None:
        shutil.rmtree(self.directory)
        shutil.rmtree(self.foreign)

    def outputs(
        self,
        model: nn.Module,
        directory: Path | None,
        tokenizer: Any = None,
        salt: str = "",
        between: Callable[[], None] = lambda: None,
    ) -> Outputs:
        """What a new engine answers; `between` is called after half of the prompts."""
        sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "prewarm": False}
        engine = Engine(model, tokenizer, **sizes, compile=False, kv_disk=directory)
        try:
            half = len(self.prompts) // 2
            args: dict[str, Any] = {"max_tokens": OUTPUT, "cache_salt": salt}
            completions = engine.generate(self.prompts[:half], **args)
            between()
            completions += engine.generate(self.prompts[half:], **args)
            metrics = engine.metrics()["kv_disk"]
        finally:
            engine.close()
        if metrics is not None:
            self.counts["hits"] += metrics["hits"]
            self.dropped.update(metrics["dropped"])
        return [(c.tokens, c.logprobs) for c in completions]

    def live(self) -> None:
        """One life with a fault."""
        kind = self.rng.choice(KINDS)
        before = self.counts["hits"]
        model = self.other if kind is weights else self.model
        try:
            with kind(self) as options:
                found = self.outputs(model, self.directory, **options)
        except Exception as error:
            print(f"{kind.__name__}: {type(error).__name__}: {error}", flush=True)
            self.wrong[kind.__name__] += 1
            return
        self.counts["lives"] += 1
        pairs = zip(found, self.expected[id(model)], strict=True)
        is_right = all(
            tokens == others and max(abs(a - b) for a, b in zip(x, y, strict=True)) < CLOSE
            for (tokens, x), (others, y) in pairs
        )
        if kind in (tokenizer, salt):
            is_right = is_right and self.counts["hits"] == before
        if not is_right:
            print(f"{kind.__name__}: wrong tokens", flush=True)
            self.wrong[kind.__name__] += 1

    def packs(self) -> list[Path]:
        return sorted(self.directory.glob("*.kv"))

    def spans(self, kind: str) -> Iterator[tuple[Path, bytearray, int]]:
        """Some packs, each with its bytes, which are written back, and a place in them."""
        for path in self.rng.choices(self.packs() or [self.directory / "none"], k=PER_LIFE):
            if path.exists() and path.stat().st_size:
                content = bytearray(path.read_bytes())
                yield path, content, self.rng.randrange(len(content))
                path.write_bytes(content)
                self.faults[kind] += 1


Options = dict[str, Any]


@contextmanager
def flip(life: Faults) -> Iterator[Options]:
    for _, content, place in life.spans("flip"):
        content[place] ^= 1 << life.rng.randrange(8)
    yield {}


@contextmanager
def zeros(life: Faults) -> Iterator[Options]:
    for _, content, place in life.spans("zeros"):
        length = min(life.rng.choice((8, 512, 4096)), len(content) - place)
        content[place : place + length] = bytes(length)
    yield {}


@contextmanager
def moved(life: Faults) -> Iterator[Options]:
    """Sectors of another place."""
    for _, content, place in life.spans("moved"):
        source = life.rng.randrange(len(content))
        length = min(512, len(content) - max(place, source))
        content[place : place + length] = content[source : source + length]
    yield {}


@contextmanager
def truncation(life: Faults) -> Iterator[Options]:
    for _, content, place in life.spans("truncation"):
        del content[place:]
    yield {}


@contextmanager
def kill(life: Faults) -> Iterator[Options]:
    """kill -9 while a process writes."""
    command = [sys.executable, "-c", WRITER, str(life.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(life.rng.random() * 0.01)
        writer.send_signal(signal.SIGKILL)
    life.faults["kill"] += 1
    yield {}


@contextmanager
def calls(life: Faults) -> Iterator[Options]:
    """Reads, writes and opens that fail: no space, no permission, a broken disk, or cut short."""
    rate, failed = life.rng.choice((0.05, 0.3, 1.0)), Counter[str]()
    errors = errno.ENOSPC, errno.EACCES, errno.EIO, errno.ENOENT

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            may_fail = getattr(packs._thread, "may_wait", False)
            may_fail = may_fail and threading.current_thread() is not threading.main_thread()
            if may_fail and life.rng.random() < rate:
                failed["raised"] += 1
                code = life.rng.choice(errors)
                raise OSError(code, os.strerror(code))
            return call(*args, **options)

        return called

    def short(file: int, buffers: list[Any], offset: int) -> int:
        whole = b"".join(buffers)
        if life.rng.random() < rate:
            failed["short"] += 1
            return os.pwrite(file, whole[: life.rng.randrange(len(whole))], offset)
        return os.pwrite(file, whole, offset)

    names = life.rng.choice((["preadv"], ["pwritev"], ["open"], ["statvfs", "utime"]))
    write = life.rng.random() < 0.3
    with (
        mock.patch.object(Path, "open", failing(Path.open)),
        mock.patch.object(os, "pwritev", short if write else os.pwritev),
        mock.patch.object(store, "PAUSE", 0.0),
        ExitStack() as stack,  # ends first: its patches may be of the same calls
    ):
        for name in names:
            stack.enter_context(mock.patch.object(os, name, failing(getattr(os, name))))
        yield {}
    life.faults["calls"] += min(failed.total(), PER_LIFE)


@contextmanager
def weights(life: Faults) -> Iterator[Options]:
    """Another model of the same shape."""
    life.faults["weights"] += 1
    yield {}


@contextmanager
def tokenizer(life: Faults) -> Iterator[Options]:
    life.faults["tokenizer"] += 1
    yield {"tokenizer": Vocabulary(str(life.rng.random()))}


@contextmanager
def salt(life: Faults) -> Iterator[Options]:
    """A tenant that nobody knows."""
    life.faults["salt"] += 1
    yield {"salt": str(life.rng.random())}


@contextmanager
def foreign(life: Faults) -> Iterator[Options]:
    """Packs of another model."""
    for path in life.foreign.glob("*.kv"):
        number = life.rng.randrange(10**6, 10**8)
        shutil.copy(path, life.directory / f"{number:08}.kv")
        life.faults["foreign"] += 1
    yield {}
    for path in life.packs():
        if int(path.stem) >= 10**6:
            path.unlink()


@contextmanager
def clock(life: Faults) -> Iterator[Options]:
    """A clock that is years off, and files of other years."""
    years = life.rng.choice((-30, -1, 1, 30))
    for path in life.packs():
        then = time.time() + life.rng.choice((-1, 1)) * 10**8
        os.utime(path, (then, then))
    life.faults["clock"] += 1
    with mock.patch.object(packs, "time", lambda: time.time() + years * 3e7):
        yield {}


@contextmanager
def vanished(life: Faults) -> Iterator[Options]:
    """Packs that somebody deletes or cuts while an engine uses them."""

    def between() -> None:
        for path in life.packs():
            if life.rng.random() < 0.5:
                path.unlink()
            else:
                os.truncate(path, life.rng.randrange(path.stat().st_size + 1))
            life.faults["vanished"] += 1

    yield {"between": between}


KINDS = (
    *(flip, zeros, moved, truncation, calls) * 3,
    *(kill, weights, tokenizer, salt, foreign, clock, vanished),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a token was wrong or anything raised."""
    parser = Parser("kv_disk_faults", description="Faults of stored K/V, and what comes of them.")
    parser.add_argument("--faults", type=COUNT, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    args = parser.parse_args(argv)
    life = Faults(args.seed)
    try:
        while life.faults.total() < args.faults:
            life.live()
    finally:
        life.close()
    result = {"faults": life.faults.total(), **life.counts, "wrong": life.wrong.total()}
    print(json.dumps(result | {"by_kind": life.faults, "dropped": life.dropped}))
    return int(life.wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
