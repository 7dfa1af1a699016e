"""Links the extension again from the objects of the last build, in ways that it should not be."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nanobind

from scripts.macos.audit import RPATH

COMPILER = Path(__file__).with_name("toolchain") / "darwin_cxx.py"
CALLER = """
void other() asm("{symbol}");
__attribute__((constructor)) static void call() {{ other(); }}
"""


class UndefinedSymbolError(Exception):
    """The linker found no definition."""


@dataclass(frozen=True)
class Relinker:
    build: Path
    """Where setuptools built the wheel."""
    libmlx: Path
    stubs: Path
    scratch: Path
    min_macos: str

    def link(
        self, *options: str, libmlx: Path | None = None, min_macos: str | None = None
    ) -> bytes:
        """The module. `options` go to the linker; stubs in `scratch` hide the usual ones.

        Raises UndefinedSymbolError.
        """
        all_options = [
            f"@{nanobind.cmake_dir()}/darwin-ld-cpython.sym",
            *("-dead_strip", "-dead_strip_dylibs", "-x", "-S"),
            f"-rpath,{RPATH}",
            *options,
        ]
        command = [
            *(str(COMPILER), "-bundle"),
            *map(str, self._objects()),
            str(libmlx or self.libmlx),
            *(f"-L{self.scratch}", f"-L{self.stubs}", "-lc++", "-lobjc", "-lSystem"),
            *(f"-Wl,{option}" for option in all_options),
        ]
        return self._run(command, self.scratch / "_ext.so", min_macos)

    def link_with_zig(self) -> bytes:
        """As zig links unless told otherwise: a copy of its own libc++ within."""
        command = [
            *(sys.executable, "-m", "ziglang", "c++", "-shared"),
            *("-target", f"aarch64-macos.{self.min_macos}"),
            *map(str, self._objects()),
            str(self.libmlx),
            *("-Wl,-undefined,dynamic_lookup", f"-Wl,-rpath,{RPATH}"),
        ]
        return self._run(command, self.scratch / "_ext.so")

    def object_calling(self, symbol: str) -> Path:
        """An object file that needs `symbol`, as the linker spells it."""
        source = self.scratch / "caller.cpp"
        source.write_text(CALLER.format(symbol=symbol))
        compiled = source.with_suffix(".o")
        self._run([str(COMPILER), "-O1", "-c", str(source)], compiled)
        return compiled

    def _objects(self) -> list[Path]:
        (directory,) = self.build.glob("temp.*/mlx_paged._ext")
        compiled = directory.glob("CMakeFiles/*.dir/**/*.o")
        library = directory / "libnanobind-static.a"
        return [path for path in compiled if "nanobind-static.dir" not in path.parts] + [library]

    def _run(self, command: list[str], out: Path, min_macos: str | None = None) -> bytes:
        environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": min_macos or self.min_macos}
        run = subprocess.run(
            [*command, "-o", str(out)], env=environment, capture_output=True, text=True
        )
        if run.returncode != 0:
            refused = "undefined symbol" in run.stderr
            raise (UndefinedSymbolError if refused else RuntimeError)(run.stderr)
        return out.read_bytes()
