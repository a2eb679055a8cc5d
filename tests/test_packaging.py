"""The packages that we ask for are new enough for the generated code that is committed here."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[1]
PROJECTS = {
    "pyproject.toml": "src/holdfast/serving/grpc/gen",
    "sdks/python/pyproject.toml": "sdks/python/src/holdfast_sdk/gen",
}


def stub_versions(folder: str) -> tuple[Version, Version]:
    """The oldest grpcio and the oldest protobuf that the Python stubs in `folder` accept."""
    code = "\n".join(path.read_text() for path in sorted((REPOSITORY / folder).glob("*.py")))
    grpcio = re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", code, re.MULTILINE)
    protobuf = re.findall(r"ValidateProtobufRuntimeVersion\(\s*[\w.]+,\s*(\d+),\s*(\d+),\s*(\d+),", code)
    assert grpcio
    assert protobuf
    return max(map(Version, grpcio)), max(Version(".".join(numbers)) for numbers in protobuf)


def requirements(project: str) -> list[Requirement]:
    """All that a pyproject.toml asks for, its extras included."""
    content = tomllib.loads((REPOSITORY / project).read_text())["project"]
    extras = content["optional-dependencies"].values()
    return [Requirement(line) for lines in (content["dependencies"], *extras) for line in lines]


def floor(requirement: Requirement) -> Version:
    (version,) = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==", "~=")]
    return version


@pytest.mark.parametrize(("project", "stubs"), PROJECTS.items())
def test_the_oldest_packages_that_a_project_allows_can_load_its_stubs(project: str, stubs: str) -> None:
    grpcio, protobuf = stub_versions(stubs)
    asked = requirements(project)
    assert {"grpcio", "grpcio-tools", "protobuf"} <= {requirement.name for requirement in asked}
    for requirement in asked:
        if requirement.name.startswith("grpcio"):  # released together, and each needs a grpcio of its own version
            assert floor(requirement) >= grpcio, requirement
        elif requirement.name == "protobuf":
            assert floor(requirement) >= protobuf, requirement


def test_the_pinned_packages_are_ones_that_the_projects_allow() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for requirement in [requirement for project in PROJECTS for requirement in requirements(project)]:
        pin = pins.get(requirement.name.lower())
        assert pin is None or requirement.specifier.contains(pin.split(";")[0].strip(), prereleases=True), requirement


def test_the_TypeScript_SDK_asks_for_the_runtime_that_its_stubs_were_made_for() -> None:
    sdk = REPOSITORY / "sdks/typescript"
    package = json.loads((sdk / "package.json").read_text())
    stubs = [path.read_text() for path in sorted((sdk / "src/gen").rglob("*.ts"))]
    made_with = {Version(found) for stub in stubs for found in re.findall(r"by protoc-gen-es v([\d.]+)", stub)}
    assert made_with
    runtime = Version(package["dependencies"]["@bufbuild/protobuf"].lstrip("~^"))
    assert runtime >= max(made_with)
    assert {Version(package["devDependencies"]["@bufbuild/protoc-gen-es"])} == made_with
