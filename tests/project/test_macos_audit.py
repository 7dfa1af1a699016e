"""The audit of the macOS wheel, on made-up files: each defect fails its check and no other.

What needs the cross toolchain is in scripts/macos/negative_controls.py.
"""

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Behind everything else: an installed mlx_paged goes before the source tree's.
sys.path.append(str(ROOT))

from scripts.macos.audit import RPATH, Surroundings, check_extension  # noqa: E402
from scripts.macos.check import Check  # noqa: E402
from scripts.macos.code_signature import CodeSignature, read_signature, rehash  # noqa: E402
from scripts.macos.macho import (  # noqa: E402
    INTERPRETER,
    LIBCXX,
    LIBMLX,
    LIBOBJC,
    LIBSYSTEM,
    Import,
    MachO,
)
from scripts.macos.toolchain import darwin_cxx  # noqa: E402
from scripts.macos.wheel import Expected, Wheel, check_wheel, package_files  # noqa: E402
from scripts.macos.witnesses import load, save, text_stub, witnessed_symbols  # noqa: E402

KEY = "nanobind_system_libcpp_abi1_a1_v22"

EXTENSION = MachO(
    cpu="ARM64",
    kind="BUNDLE",
    platform="MACOS",
    min_macos=(14, 0, 0),
    install_name=None,
    dependencies=(LIBCXX, LIBSYSTEM, LIBMLX),
    rpaths=(RPATH,),
    imports=frozenset(
        {
            Import("___cxa_throw", LIBCXX),
            Import("___gxx_personality_v0", LIBCXX),
            Import("_memcpy", LIBSYSTEM),
            Import("__ZN3mlx4core4evalE", LIBMLX),
            Import("_PyLong_Type", INTERPRETER),
        }
    ),
    exports=frozenset({"_PyInit__ext"}),
    fixups="chained",
    sections={"__text": 4096, "__gcc_except_tab": 64, "__unwind_info": 64},
    strings=frozenset({KEY, f"{KEY} expected", "mlx"}),
)
CORE = replace(EXTENSION, exports=frozenset({"_PyInit_core"}))
LIB = replace(EXTENSION, kind="DYLIB", install_name=LIBMLX, rpaths=())
AROUND = Surroundings(
    LIB,
    CORE,
    {entry.library: frozenset({entry.symbol}) for entry in EXTENSION.imports}
    | {LIBCXX: frozenset({"___cxa_throw", "___gxx_personality_v0"})},
)
SIGNATURE = CodeSignature(is_adhoc=True, covers_code=True, valid_pages=3, pages=3)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def with_import(symbol: str, library: str) -> MachO:
    return replace(EXTENSION, imports=EXTENSION.imports | {Import(symbol, library)})


def with_strings(*strings: str) -> MachO:
    return replace(EXTENSION, strings=frozenset(strings))


def test_good_extension_passes():
    assert failed(check_extension(EXTENSION, SIGNATURE, AROUND)) == []


def test_objective_c_runtime_is_allowed():
    symbol = "_objc_msgSend"
    ext = replace(with_import(symbol, LIBOBJC), dependencies=(*EXTENSION.dependencies, LIBOBJC))
    known = {**AROUND.symbols, LIBOBJC: frozenset({symbol})}
    assert failed(check_extension(ext, SIGNATURE, replace(AROUND, symbols=known))) == []


@pytest.mark.parametrize(
    ("name", "ext"),
    [
        pytest.param("format", replace(EXTENSION, cpu="X86_64"), id="cpu"),
        pytest.param("format", replace(EXTENSION, kind="DYLIB"), id="kind"),
        pytest.param("deployment target", replace(EXTENSION, platform="IOS"), id="platform"),
        pytest.param("deployment target", replace(EXTENSION, min_macos=(15, 0, 0)), id="newer"),
        pytest.param("deployment target", replace(EXTENSION, min_macos=(13, 0, 0)), id="older"),
        pytest.param(
            "dependencies",
            replace(EXTENSION, dependencies=(LIBCXX, LIBSYSTEM)),
            id="libmlx not linked",
        ),
        pytest.param(
            "dependencies",
            replace(EXTENSION, dependencies=(*EXTENSION.dependencies, "/opt/lib/libz.dylib")),
            id="another library",
        ),
        pytest.param("rpath", replace(EXTENSION, rpaths=()), id="no rpath"),
        pytest.param("rpath", replace(EXTENSION, rpaths=(RPATH, "/opt")), id="two rpaths"),
        pytest.param(f"symbols of {LIBMLX}", with_import("_no", LIBMLX), id="libmlx symbol"),
        pytest.param(f"symbols of {LIBCXX}", with_import("_no", LIBCXX), id="libc++ symbol"),
        pytest.param(f"symbols of {LIBSYSTEM}", with_import("_no", LIBSYSTEM), id="libSystem"),
        pytest.param(f"symbols of {INTERPRETER}", with_import("_no", INTERPRETER), id="CPython"),
        pytest.param("symbols of elsewhere", with_import("_no", "elsewhere"), id="unknown library"),
        pytest.param(
            "C++ runtime",
            replace(EXTENSION, imports=EXTENSION.imports - {Import("___cxa_throw", LIBCXX)}),
            id="own exceptions",
        ),
        pytest.param(
            "unwind tables",
            replace(EXTENSION, sections={"__unwind_info": 64}),
            id="no exception tables",
        ),
        pytest.param(
            "unwind tables",
            replace(EXTENSION, sections={"__gcc_except_tab": 64, "__unwind_info": 0}),
            id="empty unwind info",
        ),
        pytest.param("exports", replace(EXTENSION, exports=frozenset()), id="no export"),
        pytest.param(
            "exports",
            replace(EXTENSION, exports=EXTENSION.exports | {"__Znwm"}),
            id="second export",
        ),
        pytest.param("fixups", replace(EXTENSION, fixups="opcodes"), id="opcodes"),
        pytest.param("nanobind key", with_strings("mlx"), id="no nanobind"),
        pytest.param("nanobind key", with_strings("v19_system_libcpp_abi1", "mlx"), id="old key"),
        pytest.param("nanobind key", with_strings(f"{KEY}_stable", "mlx"), id="stable key"),
        pytest.param("nanobind domain", with_strings(KEY, "mlx.core"), id="other domain"),
    ],
)
def test_defect_of_extension(name: str, ext: MachO):
    assert failed(check_extension(ext, SIGNATURE, AROUND)) == [name]


def test_libmlx_of_another_name():
    around = replace(AROUND, libmlx=replace(LIB, install_name="/usr/local/lib/libmlx.dylib"))
    assert failed(check_extension(EXTENSION, SIGNATURE, around)) == ["dependencies"]


@pytest.mark.parametrize(
    "signature",
    [
        pytest.param(None, id="none"),
        pytest.param(replace(SIGNATURE, is_adhoc=False), id="identity"),
        pytest.param(replace(SIGNATURE, covers_code=False), id="too short"),
        pytest.param(replace(SIGNATURE, valid_pages=2), id="page changed"),
    ],
)
def test_defect_of_signature(signature: CodeSignature | None):
    assert failed(check_extension(EXTENSION, signature, AROUND)) == ["code signature"]


PAGE = 4096
CODE_SIZE = 2 * PAGE + 100


def signed_file(flags: int = 0x20002, code_limit: int = CODE_SIZE) -> bytes:
    """Header, one load command, code, and an embedded signature of SHA-256 page hashes."""
    command = struct.pack("<IIII", 0x1D, 16, CODE_SIZE, 512)
    header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 8, 1, len(command), 0, 0)
    code = (header + command).ljust(CODE_SIZE, b"\x5a")
    pages = [code[at : min(at + PAGE, code_limit)] for at in range(0, code_limit, PAGE)]
    hashes = b"".join(hashlib.sha256(page).digest() for page in pages)
    identifier = b"_ext\0"
    sizes = (44 + len(identifier), 44, 0, len(pages), code_limit)
    length = 44 + len(identifier) + len(hashes)
    directory = struct.pack(">9I4BI", 0xFADE0C02, length, 0x20400, flags, *sizes, 32, 2, 0, 12, 0)
    blob = struct.pack(">5I", 0xFADE0CC0, 20 + length, 1, 0, 20)
    return code + blob + directory + identifier + hashes


def test_signature_of_every_page_is_read():
    assert read_signature(signed_file()) == CodeSignature(True, True, 3, 3)


@pytest.mark.parametrize("at", [200, PAGE, CODE_SIZE - 1])
def test_flipped_byte_breaks_one_page(at: int):
    file = bytearray(signed_file())
    file[at] ^= 1
    signature = read_signature(bytes(file))
    assert signature is not None and not signature.is_valid
    assert (signature.valid_pages, signature.pages) == (2, 3)
    assert read_signature(rehash(bytes(file))) == SIGNATURE


def test_signature_that_ends_early():
    signature = read_signature(signed_file(code_limit=PAGE))
    assert signature == CodeSignature(True, covers_code=False, valid_pages=1, pages=1)


def test_signature_with_identity():
    signature = read_signature(signed_file(flags=0))
    assert signature is not None and not signature.is_adhoc


def test_unsigned_file():
    file = signed_file()
    assert read_signature(file[:32] + struct.pack("<I", 0x26) + file[36:]) is None


def test_old_binaries_witness():
    newer = replace(with_import("_of_15", LIBSYSTEM), min_macos=(15, 0, 0))
    phone = replace(with_import("_of_ios", LIBSYSTEM), platform="IOS")
    optional = Import("_perhaps", LIBSYSTEM, may_be_absent=True)
    guarded = replace(EXTENSION, imports=EXTENSION.imports | {optional})
    older = replace(with_import("_of_12", LIBSYSTEM), min_macos=(12, 0, 0))
    symbols = witnessed_symbols([newer, phone, guarded, older], (14, 0, 0))
    assert symbols[LIBSYSTEM] == {"_memcpy", "_of_12"}
    assert symbols[LIBCXX] == {"___cxa_throw", "___gxx_personality_v0"}


def test_stubs_list_what_the_audit_knows(tmp_path: Path):
    symbols = {LIBCXX: frozenset({"__Znwm", "__ZdlPv"}), LIBOBJC: frozenset({"_objc_msgSend"})}
    symbols[LIBSYSTEM] = frozenset({"_memcpy"})
    save(tmp_path, symbols)
    assert load(tmp_path) == symbols
    assert (tmp_path / "libc++.tbd").read_text() == text_stub(LIBCXX, ["__Znwm", "__ZdlPv"])
    assert "symbols: [ '__ZdlPv', '__Znwm' ]" in text_stub(LIBCXX, symbols[LIBCXX])


EXPECTED = Expected(
    tag="cp311-cp311-macosx_14_0_arm64",
    extension="mlx_paged/_ext.cpython-311-darwin.so",
    package_files=frozenset({"mlx_paged/__init__.py", "mlx_paged/py.typed"}),
    mlx_version="0.32.4",
)
METADATA = """Name: mlx-paged
Requires-Dist: mlx[cpu]==0.32.3; sys_platform == "linux"
Requires-Dist: mlx==0.32.4; sys_platform == "darwin"
Requires-Dist: mlx-lm<0.33
"""
INFO = "mlx_paged-0.1.0.dist-info"
WHEEL = Wheel(
    f"mlx_paged-0.1.0-{EXPECTED.tag}.whl",
    {
        **dict.fromkeys(EXPECTED.package_files, b"source"),
        EXPECTED.extension: b"code",
        f"{INFO}/METADATA": METADATA.encode(),
        f"{INFO}/WHEEL": f"Root-Is-Purelib: false\nTag: {EXPECTED.tag}\n".encode(),
    },
).with_new_record()


def with_text(file: str, old: str, new: str) -> Wheel:
    path = f"{INFO}/{file}"
    text = WHEEL.files[path].decode()
    assert old in text
    return WHEEL.with_files({path: text.replace(old, new).encode()})


def test_good_wheel_passes():
    assert failed(check_wheel(WHEEL, EXPECTED)) == []


@pytest.mark.parametrize(
    ("name", "wheel"),
    [
        pytest.param(
            "wheel tags",
            replace(WHEEL, name="mlx_paged-0.1.0-cp311-cp311-linux_x86_64.whl"),
            id="tag in the name",
        ),
        pytest.param("wheel tags", with_text("WHEEL", "14_0", "11_0"), id="tag inside"),
        pytest.param("wheel tags", with_text("WHEEL", "false", "true"), id="pure"),
        pytest.param("wheel contents", WHEEL.without("mlx_paged/py.typed"), id="missing"),
        pytest.param("wheel contents", WHEEL.without(EXPECTED.extension), id="no extension"),
        pytest.param(
            "wheel contents",
            WHEEL.with_files({"mlx_paged/_ext.cpython-311-x86_64-linux-gnu.so": b""}),
            id="unexpected",
        ),
        pytest.param(
            "wheel record",
            replace(WHEEL, files={**WHEEL.files, "mlx_paged/py.typed": b"changed"}),
            id="changed",
        ),
        pytest.param(
            "wheel record",
            replace(WHEEL, files={**WHEEL.files, f"{INFO}/top_level.txt": b""}),
            id="not recorded",
        ),
        pytest.param("mlx requirement", with_text("METADATA", "0.32.4", "0.32.2"), id="other mlx"),
        pytest.param("mlx requirement", with_text("METADATA", "darwin", "win32"), id="no mlx"),
    ],
)
def test_defect_of_wheel(name: str, wheel: Wheel):
    assert failed(check_wheel(wheel, EXPECTED)) == [name]


def test_package_files_are_the_sources(tmp_path: Path):
    names = "__init__.py", "_ext.cpython-311-darwin.so", "demo/a.json", "x.pyc", ".hidden"
    for path in (*(f"mlx_paged/{name}" for name in names), "bench/a/b.py", "bench/a/b.pyc"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    expected = {"__init__.py", "demo/a.json", "with_bench/bench/a/b.py"}
    assert package_files(tmp_path) == {f"mlx_paged/{name}" for name in expected}


def test_compiler_is_given_no_sdk():
    args = ["-arch", "arm64", "-isysroot", "/sdk", "-F/frameworks", "-mmacosx-version-min=14.0"]
    kept = darwin_cxx.without_sdk_options([*args, "-O3", "-c", "a.cpp"])
    assert kept == ["-O3", "-c", "a.cpp"]
    command = darwin_cxx.compile_command(kept, "14.0")
    assert command[command.index("-target") + 1] == "aarch64-macos.14.0"


def test_linker_is_given_what_the_compiler_would_hand_on():
    args = darwin_cxx.without_sdk_options(
        ["-O3", "-bundle", "-Wl,-rpath,@loader_path", "-o", "a.so", "a.o", "-framework", "Metal"]
    )
    command = darwin_cxx.link_command([*args, "-L/stubs", "-lc++"], "14.0")
    assert command[command.index("-bundle") :] == (
        ["-bundle", "-rpath", "@loader_path", "-o", "a.so", "a.o", "-L/stubs", "-lc++"]
    )


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the build script where only the shell's own tools are to be found."""
    for tool in ("bash", "dirname", "realpath"):
        found = next(
            path
            for directory in os.defpath.split(":")
            if (path := Path(directory or ".", tool)).exists()
        )
        (tmp_path / tool).symlink_to(found)

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "scripts" / "build_macos_wheel.sh")
        environment = {"PATH": str(tmp_path)}
        return subprocess.run(
            [script, *args], env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_missing_toolchain_names_the_packages(run_script):
    run = run_script()
    assert run.returncode == 2
    assert run.stderr == "ld64.lld-19 is missing: apt-get install lld-19 llvm-19\n"


def test_unknown_option_prints_the_usage(run_script):
    run = run_script("--sdk")
    assert run.returncode == 2
    assert run.stderr.startswith("usage:")
