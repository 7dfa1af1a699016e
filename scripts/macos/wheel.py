"""A wheel as a dictionary, and the checks of its name, metadata and contents."""

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Self

from packaging.requirements import Requirement
from packaging.version import Version

from scripts.macos.check import Check

PACKAGE = "mlx_paged"
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
SHOWN = 4


@dataclass(frozen=True)
class Wheel:
    name: str
    """File name."""
    files: Mapping[str, bytes]
    """Contents by path within the wheel."""

    @classmethod
    def read(cls, path: Path) -> Self:
        with zipfile.ZipFile(path) as archive:
            files = {info.filename: archive.read(info) for info in archive.infolist()}
        return cls(path.name, files)

    @property
    def dist_info(self) -> str:
        return "-".join(self.name.split("-")[:2]) + ".dist-info"

    def header(self, name: str) -> Message:
        """One of the files in RFC 822 form: METADATA or WHEEL."""
        text = self.files.get(f"{self.dist_info}/{name}", b"").decode()
        return Parser().parsestr(text, headersonly=True)

    def with_files(self, changed: Mapping[str, bytes]) -> Self:
        """The same with some files replaced or added, and RECORD to match."""
        return replace(self, files={**self.files, **changed}).with_new_record()

    def without(self, path: str) -> Self:
        files = {name: data for name, data in self.files.items() if name != path}
        return replace(self, files=files).with_new_record()

    def with_new_record(self) -> Self:
        record = f"{self.dist_info}/RECORD"
        recorded = {path: data for path, data in self.files.items() if path != record}
        rows = [(path, record_hash(data), len(data)) for path, data in recorded.items()]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        return replace(self, files={**recorded, record: text.getvalue().encode()})


def record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


@dataclass(frozen=True)
class Expected:
    tag: str
    """Such as cp311-cp311-macosx_14_0_arm64."""
    extension: str
    """Path of the compiled module within the wheel."""
    package_files: frozenset[str]
    """Paths within the wheel of everything else that the package consists of."""
    mlx_version: str
    """The release that the extension was linked against."""


def package_files(root: Path) -> frozenset[str]:
    """What of the source tree belongs into every wheel: the package, and bench/ below it."""
    homes = {PACKAGE: "", "bench": f"{PACKAGE}/with_bench/"}
    return frozenset(
        home + path.relative_to(root).as_posix()
        for folder, home in homes.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc") and not path.name.startswith(".")
    )


def check_wheel(wheel: Wheel, expected: Expected) -> list[Check]:
    return [
        _tags(wheel, expected.tag),
        _contents(wheel, expected),
        _record(wheel),
        _mlx_requirement(wheel, expected.mlx_version),
    ]


def _tags(wheel: Wheel, tag: str) -> Check:
    metadata = wheel.header("WHEEL")
    in_name = wheel.name.removesuffix(".whl").split("-", 2)[2]
    inside = metadata.get_all("Tag", [])
    is_pure = metadata.get("Root-Is-Purelib") != "false"
    found = f"{in_name} in the name, {' '.join(inside)} inside" + (", pure" if is_pure else "")
    return Check("wheel tags", in_name == tag and inside == [tag] and not is_pure, found)


def _contents(wheel: Wheel, expected: Expected) -> Check:
    wanted = expected.package_files | {expected.extension}
    present = {path for path in wheel.files if not path.startswith(wheel.dist_info)}
    problems = _listed("missing", wanted - present) + _listed("unexpected", present - wanted)
    found = f"{len(present)} files" + "".join(f", {problem}" for problem in problems)
    return Check("wheel contents", not problems, found)


def _listed(what: str, names: Iterable[str]) -> list[str]:
    some = sorted(names)
    return [f"{what}: {' '.join(some[:SHOWN])}"] if some else []


def _record(wheel: Wheel) -> Check:
    record = f"{wheel.dist_info}/RECORD"
    rows = csv.reader(wheel.files.get(record, b"").decode().splitlines())
    recorded = {path: digest for path, digest, _ in rows}
    actual = {path: record_hash(data) for path, data in wheel.files.items()} | {record: ""}
    wrong = [path for path in recorded | actual if recorded.get(path) != actual.get(path)]
    return Check("wheel record", not wrong, "".join(_listed("wrong", wrong)) or "matches")


def _mlx_requirement(wheel: Wheel, version: str) -> Check:
    """libmlx's C++ interface changes between releases: the wheel must demand what it links."""
    declared = map(Requirement, wheel.header("METADATA").get_all("Requires-Dist", []))
    on_mac = (r for r in declared if r.marker is None or r.marker.evaluate(MAC))
    pins = [str(requirement.specifier) for requirement in on_mac if requirement.name == "mlx"]
    found = f"mlx{' '.join(pins)} on macOS, {version} linked"
    return Check("mlx requirement", pins == [f"=={Version(version)}"], found)
