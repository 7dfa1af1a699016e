"""Hooks of mkdocs: pages from outside docs/, the reference, links to files that are no pages."""

import ast
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "docs/README.md": "documents.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {"CONTRIBUTING.md": "contributing.md", "examples/README.md": "examples.md"}
PAGES |= {path.relative_to(ROOT).as_posix(): "" for path in ROOT.glob("docs/**/*.md")} | PAGES
for folder in ("scripts", "scripts/macos", "tests/metal_emulator", "tests/gpu_order"):
    PAGES[f"{folder}/README.md"] = f"{folder.replace('/', '-')}.md"
PAGES["tests/gpu_memory/README.md"] = "tests-gpu_memory.md"
PAGES = {path: uri or path.removeprefix("docs/") for path, uri in PAGES.items()}
"""Documents of the repository, and where the site has them."""
COMMANDS = "generate", "server", "run", "doctor", "kv_disk"


def on_config(config: Any) -> Any:
    """The repository is that of the workflow, as for the packages."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        config.repo_url = f"https://github.com/{name}"
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    pages = {
        uri: (ROOT / path).read_text()
        for path, uri in PAGES.items()
        if files.get_file_from_path(uri) is None
    }
    for uri, text in (pages | {"python-api.md": _api(), "flags.md": _flags()}).items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Links between documents lead to their pages, others to the repository if it is known."""
    uri = page.file.src_uri
    path = next((path for path, each in PAGES.items() if each == uri), f"docs/{uri}")

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups("")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if there in PAGES or there.startswith("docs/"):
            to = PAGES.get(there, there.removeprefix("docs/"))
            return f"{mark}[{text}]({posixpath.relpath(to, posixpath.dirname(uri))}{anchor})"
        if not (ROOT / there).exists():
            return found[0]  # strict mode refuses it
        return f"[{text}]({config.repo_url}/blob/main/{there})" if config.repo_url else text

    return re.sub(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, markdown)


def on_page_content(html: str, **others: Any) -> str:
    """Roles of Sphinx in docstrings show their names only."""
    return re.sub(r":(?:class|meth|func|attr|mod):<code>~?", "<code>", html)


def _api() -> str:
    """What `mlx_paged` exports, by its docstrings."""
    tree = ast.parse((ROOT / "mlx_paged" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    text = "# Python API\n\nAll public names of `mlx_paged`. Other modules may change.\n\n"
    return text + "\n\n".join(f"::: mlx_paged.{name}" for name in names)


HELP = """
import runpy, sys
names = sys.argv[1:]
for name in names:
    print(f"\\n## mlx_paged {name}\\n\\n```text")
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"mlx_paged.{name}", run_name="__main__")
    except SystemExit:
        print("```")
"""


def _flags() -> str:
    """The help of each command, all from one process."""
    shape = os.environ | {"COLUMNS": "84", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", HELP, *COMMANDS]
    done = subprocess.run(command, env=shape, capture_output=True, text=True, check=True)
    return f"# All flags\n\n[Command line](command-line.md) says what they are for.\n{done.stdout}"
