"""docs/structure.md names every file of the package, and files stay short."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mlx_paged"
SECTION = re.compile(r"^### ([\w/]+)/\n(.+)\n\n((?:- .+\n)+)", re.MULTILINE)
"""A room of the document: its name, its purpose, its files."""


def listed_rooms() -> list[tuple[str, str, list[str]]]:
    """Each room that the document names, with its purpose and its files; "" is the package."""
    rooms = SECTION.findall((ROOT / "docs" / "structure.md").read_text())
    return [
        (
            room.replace("mlx_paged", ""),
            purpose,
            re.findall(r"^- `([\w./]+)`: ", files, re.MULTILINE),
        )
        for room, purpose, files in rooms
    ]


def rooms_of_the_package() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_files_of_tests_have_names_of_their_own():
    """Else pytest takes one for the other, in folders that are no packages."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert names == sorted(set(names))


def product_files() -> list[Path]:
    suffixes = {".py", ".pyi", ".cpp", ".h", ".in", ".metal"}
    folders = ("mlx_paged", "csrc", "metal", "python")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path.relative_to(ROOT) for path in found if path.suffix in suffixes)


def num_lines(path: Path) -> int:
    return len((ROOT / path).read_text().splitlines())


def test_every_room_is_listed_once():
    assert sorted(room for room, _, _ in listed_rooms()) == sorted(["", *rooms_of_the_package()])


def test_every_module_is_listed_once():
    listed = [f"{room}/{file}".lstrip("/") for room, _, files in listed_rooms() for file in files]
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(path.relative_to(PACKAGE).as_posix() for path in paths)


def test_files_that_the_text_names_exist():
    text = (ROOT / "docs" / "structure.md").read_text()
    named = re.findall(r"(?<!\n- )`(\w+/\w+\.py)`", text)
    assert named
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_a_room_has_the_purpose_of_its_docstring():
    for room, purpose, _ in listed_rooms():
        docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
        assert purpose == docstring, room


def test_what_tests_share_is_in_folders_that_the_document_names():
    support = ROOT / "tests" / "support"
    named = re.findall(r"`(\w+)/`", (ROOT / "docs" / "structure.md").read_text())
    folders = [path.parent for path in support.glob("*/__init__.py")]
    assert folders and {folder.name for folder in folders} <= set(named)


def test_product_files_are_short():
    lengths = {str(path): num_lines(path) for path in product_files()}
    assert lengths
    assert {path: length for path, length in lengths.items() if length > 500} == {}


def test_the_readme_is_short():
    assert num_lines(Path("README.md")) <= 200
