"""Makes broken wheels of a good one."""

from dataclasses import dataclass, replace

from scripts.macos.audit import Surroundings, nanobind_key
from scripts.macos.audit_wheel import EXTENSION
from scripts.macos.code_signature import rehash
from scripts.macos.macho import LIBMLX
from scripts.macos.macho_reader import parse_macho
from scripts.macos.relink import Relinker
from scripts.macos.wheel import PACKAGE, Wheel
from scripts.macos.witnesses import STUBS, text_stub


@dataclass(frozen=True)
class Spoiler:
    wheel: Wheel
    """The good one."""
    relinker: Relinker
    around: Surroundings

    def with_extension(self, file: bytes) -> Wheel:
        return self.wheel.with_files({EXTENSION: file})

    def patched(self, old: bytes, new: bytes) -> Wheel:
        """Bytes of the extension exchanged before signing."""
        file = self.wheel.files[EXTENSION]
        assert old in file and len(old) == len(new), old
        return self.with_extension(rehash(file.replace(old, new)))

    def with_flipped_byte(self) -> Wheel:
        file = bytearray(self.wheel.files[EXTENSION])
        file[len(file) // 2] ^= 1
        return self.with_extension(bytes(file))

    def with_previous_nanobind(self) -> Wheel:
        key = nanobind_key(parse_macho(self.wheel.files[EXTENSION]))
        assert key is not None
        name, _, version = key.rpartition("_v")
        return self.patched(key.encode(), f"{name}_v{int(version) - 1}".encode())

    def with_other_domain(self) -> Wheel:
        return self.patched(b"\0mlx\0", b"\0mly\0")

    def without_exception_tables(self) -> Wheel:
        return self.patched(b"__gcc_except_tab", b"__gcc_except_xxx")

    def with_linux_module(self) -> Wheel:
        return self.with_extension(b"\x7fELF" + bytes(1000))

    def relinked(self, *options: str, min_macos: str | None = None) -> Wheel:
        return self.with_extension(self.relinker.link(*options, min_macos=min_macos))

    def calling(self, symbol: str, *options: str) -> Wheel:
        return self.relinked(str(self.relinker.object_calling(symbol)), *options)

    def calling_behind_stub(self, install_name: str, symbol: str) -> Wheel:
        """Linked against a stub of the library that has `symbol` besides the known ones."""
        names = {name: f"{stub}.tbd" for stub, name in STUBS.items()} | {LIBMLX: "libmlx.tbd"}
        stub = self.relinker.scratch / names[install_name]
        stub.write_text(text_stub(install_name, self.around.symbols[install_name] | {symbol}))
        caller = str(self.relinker.object_calling(symbol))
        libmlx = stub if install_name == LIBMLX else None
        try:
            return self.with_extension(self.relinker.link(caller, libmlx=libmlx))
        finally:
            stub.unlink()

    def without_libmlx(self) -> Wheel:
        nothing = self.relinker.stubs / "libobjc.tbd"
        return self.with_extension(self.relinker.link("-undefined,dynamic_lookup", libmlx=nothing))

    def with_another_library(self) -> Wheel:
        return self.relinked(f"-needed_library,{self.relinker.libmlx.with_name('libjaccl.dylib')}")

    def with_static_libcxx(self) -> Wheel:
        return self.with_extension(self.relinker.link_with_zig())

    def without_engine(self) -> Wheel:
        return self.wheel.without(f"{PACKAGE}/engine.py")

    def with_linux_name(self) -> Wheel:
        linux = EXTENSION.replace("-darwin", "-x86_64-linux-gnu")
        return self.wheel.without(EXTENSION).with_files({linux: self.wheel.files[EXTENSION]})

    def with_stale_record(self) -> Wheel:
        path = f"{PACKAGE}/engine.py"
        return replace(self.wheel, files={**self.wheel.files, path: b""})

    def with_older_tag(self) -> Wheel:
        return replace(self.wheel, name=self.wheel.name.replace("macosx_14_0", "macosx_11_0"))

    def with_other_mlx(self) -> Wheel:
        path = f"{self.wheel.dist_info}/METADATA"
        metadata = self.wheel.files[path].replace(b"mlx==", b"mlx>=")
        return self.wheel.with_files({path: metadata})
