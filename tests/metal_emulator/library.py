"""A Metal library that runs on the CPU."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from . import runtime_library, symbols
from .build import build_kernels
from .findings import EmulatorFinding, Finding, FindingKind
from .language.translation import host_names, translate
from .launch import Buffer, Constant, Result, check_constants, make_request, make_stats
from .modes import Mode
from .preprocess import preprocess
from .runtime_library import LoadedLibrary, RawFinding


class Library:
    """The kernels of one Metal source, compiled for one mode.

    Raises CompileError if clang refuses the source, TranslationError if the emulator does not
    understand it, and ToolchainMissing if there is no clang.
    """

    def __init__(
        self,
        source: str,
        name: str,
        mode: Mode,
        only: Collection[str] | None,
        include_dirs: Sequence[Path],
    ) -> None:
        text = preprocess(source, name, include_dirs)
        if only is not None:
            unknown = sorted(set(only) - set(host_names(text)))
            if unknown:
                raise ValueError(f"[Library] {name} has no kernel {unknown[0]}")
        translation = translate(text, None if only is None else frozenset(only))
        self._signatures = translation.kernels
        self._mode = mode
        self._path = build_kernels(translation.code, mode)
        self._loaded: dict[tuple[tuple[int, Constant], ...], LoadedLibrary] = {}

    @classmethod
    def from_source(
        cls,
        source: str,
        name: str,
        mode: Mode = Mode.FAST,
        only: Collection[str] | None = None,
        include_dirs: Sequence[Path] = (),
    ) -> Self:
        """Compile Metal `source`; findings and errors call it `name`.

        only: host names of the kernels to compile; all if None. Fewer compile faster.
        include_dirs: where #include "..." looks; the <metal_*> headers are built in.
        """
        return cls(source, name, mode, only, include_dirs)

    @classmethod
    def from_file(
        cls,
        path: Path | str,
        include_dirs: Sequence[Path] = (),
        mode: Mode = Mode.FAST,
        only: Collection[str] | None = None,
    ) -> Self:
        """Compile a .metal file; it may include files from its own directory."""
        path = Path(path)
        return cls(path.read_text(), path.name, mode, only, [path.parent, *include_dirs])

    @property
    def kernels(self) -> list[str]:
        """The host names of the kernels that were compiled."""
        return list(self._signatures)

    def launch(
        self,
        kernel: str,
        *,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        buffers: Mapping[int, Buffer],
        constants: Mapping[int, Constant] | None = None,
        threadgroup_bytes: Mapping[int, int] | None = None,
        grid_in_threads: bool = False,
        seed: int | None = None,
        check: bool = True,
    ) -> Result:
        """Run a kernel; arrays in `buffers` are written in place.

        grid: threadgroups per grid, or threads per grid if `grid_in_threads`.
        threadgroup: threads per threadgroup, at most 1024 together.
        buffers: by index, contiguous; anything read-only (bytes, a scalar, an array that is not
            writeable) must not be stored to. The same array at two indices is one buffer.
            bfloat16 is passed as raw uint16.
        constants: function constants by index; all that the kernel may read.
        threadgroup_bytes: sizes of [[threadgroup(i)]] parameters, multiples of 16.
        seed: permutes threadgroups, simdgroups and lanes; without one they run in order.
        check: raise EmulatorFinding if there are findings.

        Raises ValueError if the kernel cannot be launched like this.
        """
        signature = self._signatures.get(kernel)
        if signature is None:
            raise ValueError(f"[launch] no kernel {kernel}: there are {', '.join(self.kernels)}")
        constants = constants or {}
        check_constants(signature, constants)
        # `arrays` keeps the memory alive until the launch is over.
        request, arrays = make_request(
            signature,
            grid=grid,
            threadgroup=threadgroup,
            buffers=buffers,
            threadgroup_bytes=threadgroup_bytes or {},
            grid_in_threads=grid_in_threads,
            seed=seed,
        )
        request.kernel = self._load(constants).kernels[kernel]
        request.watch_accesses = self._mode.watches_accesses
        counts, raw_findings = runtime_library.launch(request)
        del arrays
        findings = self._locate(raw_findings)
        if check and findings:
            raise EmulatorFinding(kernel, findings)
        stats = make_stats(counts, buffers, has_traffic=self._mode.watches_accesses)
        return Result(findings, stats)

    def _load(self, constants: Mapping[int, Constant]) -> LoadedLibrary:
        key = tuple(sorted(constants.items()))
        if key not in self._loaded:
            self._loaded[key] = LoadedLibrary(self._path, constants)
        return self._loaded[key]

    def _locate(self, raw_findings: list[RawFinding]) -> list[Finding]:
        """With source lines; findings of the same kind and line become one."""
        offsets = {raw.code_offset for raw in raw_findings if raw.code_offset}
        lines = symbols.source_lines(self._path, offsets)
        merged: dict[tuple[str, str], Finding] = {}
        for raw in raw_findings:
            key = (raw.kind, lines.get(raw.code_offset, ""))
            count = raw.count + (merged[key].count if key in merged else 0)
            detail = merged[key].detail if key in merged else raw.detail
            merged[key] = Finding(FindingKind(raw.kind), key[1], detail, count)
        return [merged[key] for key in sorted(merged)]
