"""The Metal sources and names that MLX gets: what Apple's compiler refuses is not in them."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.metal.sources import DTYPES, Launch, launches
from tests.metal_emulator import require_emulator, typecheck
from tests.metal_emulator.language.translation import translate
from tests.metal_emulator.preprocess import preprocess

ROOT = Path(__file__).resolve().parents[2]
DECLARED = re.compile(r"constant \w+ \w+ \[\[function_constant\((\d+)\)\]\];")
KERNELS = (
    *("paged_attention", "matrix_attention", "merge_splits", "write_kv", "copy_blocks"),
    *("write_quantized", "write_elements", "quantize_elements", "copy_elements"),
)

LAUNCHES = {launch["kernel"]: launch for launch in launches()}


def declared(launch: Launch) -> list[int]:
    """Indices of the function constants that a launch's source declares."""
    return [int(index) for index in DECLARED.findall(launch["source"])]


class TestSources:
    def test_every_kernel_is_there_in_every_dtype(self):
        found = Counter(name for kernel in LAUNCHES for name in KERNELS if kernel.startswith(name))
        assert found.keys() == set(KERNELS)
        assert min(found.values()) >= len(DTYPES) - 1  # matrices have two dtypes

    def test_no_function_constants_of_two_files_share_an_index(self):
        files = (ROOT / "metal").iterdir()
        indices = Counter(index for file in files for index in DECLARED.findall(file.read_text()))
        assert set(indices.values()) == {1}

    @pytest.mark.sampled(12)
    @pytest.mark.parametrize("kernel", LAUNCHES)
    def test_a_kernel_can_reach_every_constant_of_its_source(self, kernel):
        """What it cannot reach would make pipelines that differ in nothing but their names."""
        require_emulator()
        text = preprocess(LAUNCHES[kernel]["source"], f"{kernel}.metal", [])
        reached = {constant.index for constant in translate(text).kernels[kernel].constants}
        assert reached == set(declared(LAUNCHES[kernel]))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """What the script writes, by name."""
    directory = tmp_path_factory.mktemp("sources") / "new"
    command = [sys.executable, "-m", "scripts.metal.sources", str(directory)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    paths = sorted(directory.iterdir())
    assert json.loads(done.stdout) == [str(path) for path in paths]
    return {path.name: path.read_text(encoding="ascii") for path in paths}


class TestWrittenFiles:
    @pytest.mark.slow
    def test_each_is_the_source_of_its_kernel(self, files):
        assert files == {f"{kernel}.metal": each["source"] for kernel, each in LAUNCHES.items()}

    @pytest.mark.sampled(45)
    @pytest.mark.parametrize("kernel", LAUNCHES)
    def test_each_compiles_alone(self, files, kernel):
        require_emulator()
        source = files[f"{kernel}.metal"]
        assert source.count(f'[[host_name("{kernel}")]]') == 1
        assert typecheck(source) == []


class TestNames:
    def test_launches_with_other_sources_have_other_libraries(self):
        by_name = {each["library"]: each["source"] for each in LAUNCHES.values()}
        assert len(by_name) == len(set(by_name.values())) == len(LAUNCHES)

    @pytest.mark.slow
    def test_pipelines_with_other_constants_have_other_names(self, tmp_path):
        """Negative ones too, which no plan has so far."""
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("there is no C++ compiler")
        lists = [
            *([(0, value)] for value in (0, 1, -1, 10, -10, 2**31 - 1, -(2**31))),
            *([(0, a), (1, b)] for a in (1, -1, 10) for b in (0, 1, -1, 10)),
            *([(1, 0)], [(10, 1)], [(1, 1), (10, 1)], []),
        ]
        constants = (
            "{" + ", ".join(f"{{{i}, Type::kInt, int32_t({v}LL)}}" for i, v in each) + "}"
            for each in lists
        )
        program = tmp_path / "names.cpp"
        program.write_text(
            '#include <iostream>\n#include "csrc/metal/launch_plan.h"\n'
            "int main() {\n  using namespace mlx_paged;\n  using Type = FunctionConstant::Type;\n"
            "  const std::vector<std::vector<FunctionConstant>> lists = {"
            + ", ".join(constants)
            + "};\n  for (const auto& constants : lists) {\n    LaunchPlan plan;\n"
            '    plan.kernel = "write_kv_half";\n    plan.constants = constants;\n'
            "    std::cout << plan.pipeline_name() << '\\n';\n  }\n}\n"
        )
        binary = tmp_path / "names"
        command = [compiler, "-std=c++20", f"-I{ROOT}", str(program), "-o", str(binary)]
        subprocess.run(command, check=True)
        names = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
        assert len(set(names)) == len(lists)
        assert all(re.fullmatch(r"[A-Za-z0-9_]+", name) for name in names)
