"""The order in which a GPU would execute launches: the real encode.cpp, on the books of MLX's
command encoder (``mlx_encoder/``)."""

import itertools
import subprocess
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.metal_emulator import require_emulator
from tests.metal_emulator.cache import cached
from tests.metal_emulator.mlx_headers import mlx_include_dir
from tests.metal_emulator.toolchain import clang

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/gpu_order/mlx_encoder"
SOURCES = [FAKE / "driver.cpp", ROOT / "csrc/metal/encode.cpp"]


@lru_cache(maxsize=1)
def _driver() -> Path:
    require_emulator()
    include = mlx_include_dir()
    library = include.parent / "lib"
    arguments = ["-std=c++20", f"-I{FAKE}", f"-I{ROOT}", f"-I{include}", *map(str, SOURCES)]
    arguments += [f"-L{library}", "-lmlx", f"-Wl,-rpath,{library}"]
    files = [*FAKE.rglob("*.h"), *(ROOT / "csrc").rglob("*.h"), *SOURCES]
    texts = [path.read_text() for path in sorted(files)]

    def make(path: Path) -> None:
        clang(*arguments, "-o", str(path))

    return cached(".encoder", [mx.__version__, *arguments, *texts], make)


@dataclass
class Encoded:
    """What happened to one command encoder.

    Attributes:
        events: "dispatch" and "barrier", in order.
        bound: the buffers of each dispatch, by index.
        waits_for: the earlier encoders whose end it waits for.
        counted: elements by which MLX decides that a command buffer is full.
    """

    events: list[str] = field(default_factory=list)
    bound: list[dict[int, int]] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)
    counted: int = 0


class EncoderScript:
    """Ops to encode, each array in a buffer of its own but for those of pools."""

    def __init__(self) -> None:
        self._words: list[Any] = []
        self._new_buffers = itertools.count(1000)

    def op(self, call: dict[str, Any], pools: dict[int, int]) -> None:
        """A call of ``_ext.metal``.

        Args:
            pools: by index of an input, the buffer that it lies in.
        """
        buffers = [pools.get(i) or next(self._new_buffers) for i in range(len(call["inputs"]))]
        for buffer, array in zip(buffers, call["inputs"], strict=True):
            self._words += ["input", buffer, array.size]
        for output in call["outputs"]:
            if isinstance(output, int):  # written in place
                self._words += ["output", buffers[output], call["inputs"][output].size]
            else:
                self._words += ["output", next(self._new_buffers), 1]
        for size in call["scratch_bytes"]:
            self._words += ["scratch", size]
        for launch in call["launches"]:
            self._words += ["launch", len(launch["buffers"]), *itertools.chain(*launch["buffers"])]
        self._words += ["encode"]

    def read(self, buffer: int, elements: int) -> None:
        """An op of MLX's own that reads a pool."""
        self._words += ["read", buffer, elements]

    def add(self, word: str) -> None:
        """A word of ``mlx_encoder/driver.cpp``."""
        self._words += [word]

    def end(self) -> None:
        """The rest goes to another command encoder."""
        self._words += ["end"]

    def lines(self) -> list[str]:
        """What the encoder prints."""
        words = " ".join(map(str, [*self._words, "end"]))
        out = subprocess.run([_driver()], input=words, text=True, check=True, capture_output=True)
        return out.stdout.splitlines()

    def run(self) -> list[Encoded]:
        encoders = [Encoded()]
        for line in self.lines()[:-1]:
            name, *rest = line.split()
            if name == "end":
                encoders[-1].waits_for = [int(number) for number in rest]
            elif name == "counted":
                encoders[-1].counted = int(rest[0])
                encoders.append(Encoded())
            else:
                encoders[-1].events.append(name)
                if name == "dispatch":
                    pairs = (pair.split(":") for pair in rest)
                    encoders[-1].bound.append({int(i): int(buffer) for i, buffer in pairs})
        return encoders[:-1]
