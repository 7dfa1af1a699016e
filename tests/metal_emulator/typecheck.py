"""Would Apple's compiler accept the types? Three passes that do not run anything."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import toolchain
from .build import check_kernels
from .language import metal_rules
from .language.opencl import to_opencl
from .language.translation import translate
from .mlx_headers import KERNELS
from .preprocess import preprocess

OPENCL_HEADERS = Path(__file__).parent / "opencl"
OPENCL_FLAGS = (
    *("-target", "x86_64-linux-gnu", "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"),
    *("-Xclang", "-cl-ext=+cl_khr_fp16", "-cl-single-precision-constant"),
    *("-fsyntax-only", "-ferror-limit=0", "-include", str(OPENCL_HEADERS / "metal.h")),
)
_DIAGNOSTIC = re.compile(
    r"(?P<file>[^\s:]+):(?P<line>\d+):\d+: (?P<kind>(?:fatal )?error|note): (?P<text>.*)"
)
_COPY_FROM_CONSTANT = re.compile(
    r"implicit copy constructor\) not viable: .* address space '__constant'"
)


@dataclass
class Diagnostic:
    """An error of clang, the places that its notes point to, and what they say."""

    file: str
    line: int
    message: str
    places: list[str]
    notes: list[str] = field(default_factory=list)

    def is_false_alarm(self) -> bool:
        # MLX's headers compile; in them only what our own code makes of templates can be wrong.
        in_mlx = all(str(KERNELS) in place for place in self.places)
        # OpenCL cannot copy a struct out of `constant`, Metal can.
        is_copy = any(_COPY_FROM_CONSTANT.search(note) for note in self.notes)
        return in_mlx or is_copy

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.message}"


def typecheck(source: str | Path, include_dirs: Sequence[Path] = ()) -> list[str]:
    """What is wrong with the types of Metal source text, or of a file: "file.metal:line: message".

    Checked are the C++ types (as the emulator compiles them), the address spaces (as C++ for
    OpenCL sees them), and that every pointer and reference names its address space.
    """
    if isinstance(source, Path):
        text = preprocess(source.read_text(), source.name, [source.parent, *include_dirs])
    else:
        text = preprocess(source, "source.metal", include_dirs)
    passes = (metal_rules.violations, _opencl_errors, _cpp_errors)
    by_place: dict[tuple[str, int], list[str]] = {}
    for find in passes:
        new: dict[tuple[str, int], list[str]] = {}
        for message in find(text):
            new.setdefault(_place(message), []).append(message)
        by_place = new | by_place  # one place, one pass: the first that finds something
    messages = [message for place in sorted(by_place) for message in by_place[place]]
    return list(dict.fromkeys(messages))


def _place(message: str) -> tuple[str, int]:
    file, line = message.split(":")[:2]
    return file, int(line)


def _opencl_errors(text: str) -> list[str]:
    try:
        toolchain.clang(*OPENCL_FLAGS, "-w", "-", source=to_opencl(text))
    except toolchain.CompileError as error:
        return [str(d) for d in parse_diagnostics(str(error)) if not d.is_false_alarm()]
    return []


def _cpp_errors(text: str) -> list[str]:
    try:
        check_kernels(translate(text).code)
    except toolchain.CompileError as error:
        return [str(d) for d in parse_diagnostics(str(error))]
    return []


def parse_diagnostics(output: str) -> list[Diagnostic]:
    """The errors in what clang printed, each with its notes."""
    diagnostics: list[Diagnostic] = []
    for line in output.splitlines():
        match = _DIAGNOSTIC.match(line)
        if not match:
            continue
        if match["kind"] != "note":
            message = _in_metal(match["text"])
            diagnostics.append(
                Diagnostic(match["file"], int(match["line"]), message, [match["file"]])
            )
        elif diagnostics:
            diagnostics[-1].notes.append(match["text"])
            if "requested here" in match["text"]:
                diagnostics[-1].places.append(match["file"])
    return diagnostics


def _in_metal(message: str) -> str:
    """With Metal's names of the address spaces."""
    names = {"global": "device", "local": "threadgroup", "private": "thread"}
    return re.sub(
        r"__(global|local|private|constant|generic)\b", lambda m: names.get(m[1], m[1]), message
    )
