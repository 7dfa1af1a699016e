"""Builds mlx_paged._ext with CMake; everything else is in pyproject.toml."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"setuptools {setuptools.__version__} cannot read pyproject.toml's SPDX license:"
        " run pip install 'setuptools>=77'"
    )


if sys.platform == "darwin":
    # The oldest macOS of MLX's wheels. Without it the wheel is for the macOS that builds it.
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")


class CMakeBuild(build_ext):
    """Runs CMake and leaves the module where setuptools expects it.

    Environment: CMAKE_ARGS (arguments for the configuration), CMAKE_BUILD_PARALLEL_LEVEL, DEBUG=1,
    MACOSX_DEPLOYMENT_TARGET.
    """

    def build_extension(self, ext: Extension) -> None:
        output_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = Path(self.build_temp).resolve() / ext.name
        debug = self.debug or os.environ.get("DEBUG", "0") == "1"
        # Without build isolation cmake and ninja lie beside a Python that need not be active.
        beside = str(Path(sys.executable).parent)
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
        if shutil.which("cmake", path=path) is None:
            sys.exit(
                "cmake is missing: --no-build-isolation needs the packages of [build-system] in"
                f" pyproject.toml in the environment of {sys.executable}"
            )
        # Fresh, because each isolated build has its dependencies in another directory.
        configure = [
            *("cmake", "--fresh", "-S", str(ROOT), "-B", str(build_dir)),
            f"-DCMAKE_BUILD_TYPE={'Debug' if debug else 'Release'}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output_dir}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # Ninja keeps all cores busy. make ends one target before it starts the next.
        if shutil.which("ninja", path=path) and "CMAKE_GENERATOR" not in os.environ:
            configure += ["-G", "Ninja"]
        build = ["cmake", "--build", str(build_dir)]
        if "CMAKE_BUILD_PARALLEL_LEVEL" not in os.environ:
            build += ["--parallel", str(os.cpu_count() or 1)]
        for command in (configure, build):
            subprocess.run(command, check=True, env=os.environ | {"PATH": path})


class WithBench(build_py):
    """Puts bench/ into the wheel, below mlx_paged/, for ``mlx_paged bench``."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "mlx_paged", "with_bench", "bench")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "bench", target, ignore=ignored, dirs_exist_ok=True)


def project_urls() -> dict[str, str]:
    """Links of the project's page on an index: to the repository whose workflow builds."""
    name = os.environ.get("GITHUB_REPOSITORY")
    if not name:
        return {}
    page = f"https://github.com/{name}"
    owner, _, repository = name.partition("/")
    return {
        "Source": page,
        "Documentation": f"https://{owner}.github.io/{repository}/",
        "Changelog": f"{page}/blob/main/CHANGELOG.md",
        "Issues": f"{page}/issues",
    }


def readme(page: str | None) -> str:
    """README.md. With a repository its links are absolute, since an index has no other files."""
    text = (ROOT / "README.md").read_text()
    if page is None:
        return text
    at = os.environ.get("GITHUB_SHA", "main")
    text = re.sub(r"(!\[[^]]*\])\((?!https?:|#)", rf"\1({page}/raw/{at}/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({page}/blob/{at}/", text)


URLS = project_urls()
setup(
    ext_modules=[Extension("mlx_paged._ext", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": WithBench},
    project_urls=URLS,
    long_description=readme(URLS.get("Source")),
    long_description_content_type="text/markdown",
)
