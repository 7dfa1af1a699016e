"""Runs the op tests on an extension that was built with a sanitizer of clang's.

    python -m scripts.sanitize [--cases sample|all] {address,undefined,thread} [pytest arguments]

Needs Debian's clang-19, libclang-rt-19-dev and llvm-19, what the README installs for the tests, and
of pyproject.toml's build requirements cmake and nanobind. The package is copied to
build/sanitize/NAME and the extension built into the copy, so that the one in place stays as it is.
The first error ends the run with a report and an exit status other than 0.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "clang++-19"
TESTS = (
    "tests/ops/test_ops.py",
    "tests/ops/test_pool_writes.py",
    "tests/ops/test_cpu_layer_ops.py",
    "tests/ops/test_cpu_likeliest.py",
    "tests/ops/test_cpu_layer_transforms.py",
    "tests/ops/test_cpu_linear.py",
    "tests/ops/test_cpu_recurrent.py",
)
SUPPRESSIONS = ROOT / "scripts" / "sanitize_thread.supp"


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """One of clang's sanitizers.

    Attributes:
        flags: of the compiler, beside ``-fsanitize``.
        runtime: library that has to be loaded before Python.
        options: environment variable that configures the runtime.
        settings: its value.
        environment: other variables for Python.
    """

    flags: tuple[str, ...]
    runtime: str
    options: str
    settings: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)


SANITIZERS = {
    # Python and MLX leave memory to the end of the process.
    "address": Sanitizer(
        (),
        "libclang_rt.asan-x86_64.so",
        "ASAN_OPTIONS",
        {"detect_leaks": 0, "halt_on_error": 1, "detect_stack_use_after_return": 1},
        {"PYTHONMALLOC": "malloc"},
    ),
    # vptr needs the type information of MLX's classes, which its library does not export.
    "undefined": Sanitizer(
        ("-fno-sanitize-recover=all", "-fno-sanitize=vptr"),
        "libclang_rt.ubsan_standalone-x86_64.so",
        "UBSAN_OPTIONS",
        {"print_stacktrace": 1, "halt_on_error": 1},
    ),
    "thread": Sanitizer(
        (),
        "libclang_rt.tsan-x86_64.so",
        "TSAN_OPTIONS",
        {"halt_on_error": 1, "suppressions": SUPPRESSIONS},
        {"MLX_PAGED_NUM_THREADS": "4"},
    ),
}


def build(name: str, stage: Path) -> None:
    """Copy the package and its tests to `stage` and build the extension into the copy."""
    for folder in ("mlx_paged", "tests"):
        shutil.copytree(
            ROOT / folder,
            stage / folder,
            ignore=shutil.ignore_patterns("_ext*", "__pycache__"),
            dirs_exist_ok=True,
        )
    shutil.copy(ROOT / "pyproject.toml", stage)
    sanitizer = SANITIZERS[name]
    # MLX's headers use what libstdc++ calls deprecated.
    common = ("-O1", "-g1", "-fno-omit-frame-pointer", "-Wno-deprecated-declarations")
    flags = (f"-fsanitize={name}", *common, *sanitizer.flags)
    places = (str(Path(sys.executable).parent), os.environ["PATH"])
    cmake = shutil.which("cmake", path=os.pathsep.join(places)) or "cmake"
    configure = [
        *(cmake, "-S", str(ROOT), "-B", str(stage / "cmake")),
        "-DCMAKE_BUILD_TYPE=Sanitize",  # Release would be stripped of the names for the reports
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
        f"-DCMAKE_CXX_FLAGS={' '.join(flags)}",
        "-DCMAKE_MODULE_LINKER_FLAGS=-shared-libsan",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={stage / 'mlx_paged'}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    jobs = str(os.cpu_count() or 1)
    subprocess.run(configure, check=True)
    subprocess.run([cmake, "--build", str(stage / "cmake"), "--parallel", jobs], check=True)


def environment(sanitizer: Sanitizer) -> dict[str, str]:
    """Python's, with the runtime loaded first and told to stop at the first error."""
    found = subprocess.run(
        [COMPILER, f"-print-file-name={sanitizer.runtime}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{COMPILER} has no {sanitizer.runtime}: apt-get install libclang-rt-19-dev")
    symbolizer = shutil.which("llvm-symbolizer-19")
    places = {"external_symbolizer_path": symbolizer} if symbolizer else {}
    settings = ":".join(f"{key}={value}" for key, value in {**sanitizer.settings, **places}.items())
    own = {"LD_PRELOAD": found, sanitizer.options: settings, "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **sanitizer.environment, **own}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.sanitize", description=__doc__)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--cases", choices=("sample", "all"), default="all", help="default: all")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help=f"default: {' '.join(TESTS)}")
    args = parser.parse_args()
    if shutil.which(COMPILER) is None:
        parser.error(f"{COMPILER} is not installed: apt-get install clang-19 libclang-rt-19-dev")
    stage = ROOT / "build" / "sanitize" / args.sanitizer
    build(args.sanitizer, stage)
    variables = environment(SANITIZERS[args.sanitizer])
    # Sanitized or not, the module under test is the one of the copy.
    check = (
        "import sys, mlx.core, mlx_paged._ext as built;"
        "sys.exit(not built.__file__.startswith(sys.argv[1]))"
    )
    python = [sys.executable, "-u"]
    subprocess.run([*python, "-c", check, str(stage)], cwd=stage, env=variables, check=True)
    tests = args.pytest or TESTS
    # The runtimes write to the standard error output of the process and end it.
    options = ("-q", "-x", "--cases", args.cases, "--capture=sys", "-p", "no:cacheprovider")
    command = [*python, "-m", "pytest", *options, *tests]
    sys.exit(subprocess.run(command, cwd=stage, env=variables).returncode)


if __name__ == "__main__":
    main()
