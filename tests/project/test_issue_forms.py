"""GitHub accepts the forms of issues, and each asks for what a maintainer needs first."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.documents import parse

yaml = pytest.importorskip("yaml", reason="the package pyyaml is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")
pytest.importorskip("check_jsonschema", reason="the package check-jsonschema is not installed")

FOLDER = Path(__file__).resolve().parents[2] / ".github" / "ISSUE_TEMPLATE"
FORMS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}
ASKS = {
    "build": ("pip install -v -e . 2>&1 | tee build.log", "xcrun", "--no-build-isolation"),
    "import": ("dlopen", "faulthandler", "~/Library/Logs/DiagnosticReports"),
    "hang": ("sample PID", "MTL_DEBUG_LAYER=1", "MLX_PAGED_METAL=0", "sysctl iogpu.wired_limit_mb"),
    "panic": ("/Library/Logs/DiagnosticReports", "*.panic", "MLX_PAGED_WIRED=1", "vm.swapusage"),
    "wrong-answer": ("mlx_lm.generate", "MLX_PAGED_METAL=0", "MLX_PAGED_ATTENTION=gather"),
    "slow": ("mlx_lm.generate", "--metrics-jsonl", "lowpower"),
}
"""What each form asks for beside the doctor's page and the versions."""
VERSIONS = (
    "sw_vers",
    "machdep.cpu.brand_string",
    "python --version",
    "mlx_metal-",
    "git rev-parse",
)


@pytest.fixture(scope="module")
def schema() -> dict:
    file = files("check_jsonschema") / "builtin_schemas/vendor/github-issue-forms.json"
    return json.loads(file.read_text())


def problems(form: dict, schema: dict) -> list[str]:
    """What GitHub refuses: what its schema says, and names that two fields have."""
    found = [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(form)]
    for names in (
        [part.get("id") for part in form["body"]],
        [part["attributes"].get("label") for part in form["body"]],
    ):
        found += [f"{name} twice" for name in set(names) if names.count(name) > 1]
    return found


def text_of(form: dict, field: str | None = None) -> str:
    """What a form, or one field of it, asks for."""
    parts = [part for part in form["body"] if field in (None, part["id"])]
    return "\n".join(part["attributes"].get("description", "") for part in parts)


def test_there_is_a_form_for_each_kind_of_failure():
    assert set(FORMS) == set(ASKS)
    assert len({form["name"] for form in FORMS.values()}) == len(FORMS)


@pytest.mark.parametrize("name", ASKS)
def test_a_form_is_valid(name, schema):
    assert problems(FORMS[name], schema) == []


@pytest.mark.parametrize("name", ASKS)
def test_a_form_asks_for_the_page_of_the_doctor_and_for_versions(name):
    form = FORMS[name]
    assert "mlx_paged.doctor" in text_of(form, "doctor")
    for command in VERSIONS:
        assert command in text_of(form, "versions"), command
    (versions,) = (part for part in form["body"] if part["id"] == "versions")
    assert versions["validations"]["required"]


@pytest.mark.parametrize("name", ASKS)
def test_a_form_asks_for_what_tells_its_kind_of_failure(name):
    for text in ASKS[name]:
        assert text in text_of(FORMS[name]), text


@pytest.mark.parametrize("name", ASKS)
def test_commands_of_the_package_are_right(name):
    for module, arguments in re.findall(
        r"`python -m (mlx_paged\.\w+) ?([^`]*)`", text_of(FORMS[name])
    ):
        parse(module, tuple(arguments.split()), check=True)


def test_mistakes_are_found(schema):
    form = yaml.safe_load((FOLDER / "hang.yml").read_text())
    form["body"][1]["id"] = form["body"][0]["id"]
    form["body"][0]["kind"] = form["body"][0].pop("type")
    assert any("twice" in problem for problem in problems(form, schema))
    assert len(problems(form, schema)) > 1
