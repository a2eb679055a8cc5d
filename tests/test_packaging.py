"""What we ask package managers for: new enough for the generated code here, and really ours where it has our name."""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from holdfast import extras

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


SERVER, SDK = (tomllib.loads((REPOSITORY / path).read_text())["project"] for path in PROJECTS)
OTHERS = {"langchain-openai", "triton"}  # on PyPI, and not pinned in constraints.txt


def flaw_of(command: str) -> str | None:
    """Why the words after `pip install` would not install what they say, from a checkout or from wheel files."""
    pins = re.findall(r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    for word in shlex.split(command, comments=True):
        if word.startswith("-") or word.startswith("{"):
            continue
        found = re.fullmatch(r"(?P<what>[^\[\]]*?)(?:\[(?P<extras>[\w,-]+)\])?(?P<version>[=<>~!].*)?", word)
        if not found:
            return f"{word!r} is neither a package nor a file"
        is_file = "/" in word or found["what"] in (".", "..") or found["what"].endswith((".whl", ".txt"))
        is_sdk = found["what"].rstrip("/").endswith("sdks/python") or Path(found["what"]).name.startswith(
            "holdfast_llm_sdk-"
        )
        if is_file:
            known = (SDK if is_sdk else SERVER)["optional-dependencies"]
            if unknown := set((found["extras"] or "").split(",")) - {""} - set(known):
                return f"{word!r} has no extra {unknown.pop()!r}"
        elif canonicalize_name(found["what"]) not in {canonicalize_name(name) for name in pins} | OTHERS:
            return f"{word!r} is not a package that we use, and ours are on no package index: name a file"
    return None


def written_lines() -> Iterator[tuple[str, str]]:
    """Every line of documents, messages and build files, and where it is."""
    for pattern in (
        "*.md",
        "Makefile",
        "docs/**/*.md",
        "sdks/*/README.md",
        "examples/*",
        "src/**/*.py",
        "sdks/*/src/**/*",
    ):
        for path in sorted(REPOSITORY.glob(pattern)):
            if path.is_file() and path.suffix in (".md", ".py", ".ts", ""):
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    yield f"{path.relative_to(REPOSITORY)}:{number}", line


def install_lines() -> Iterator[tuple[str, str]]:
    """Every `pip install`: where it is, and the words after it."""
    for place, line in written_lines():
        for words in re.findall(r"pip3? install ((?:'[^']*'|[^`'\";()])+)", line):
            yield place, words.rstrip("., ")


def test_the_packages_have_names_that_nobody_else_has() -> None:
    package = json.loads((REPOSITORY / "sdks/typescript/package.json").read_text())
    assert (SERVER["name"], SDK["name"], package["name"]) == ("holdfast-llm", "holdfast-llm-sdk", "holdfast-llm-sdk")
    assert SERVER["name"] == extras.DISTRIBUTION


def test_every_pip_install_line_installs_what_it_says() -> None:
    lines = list(install_lines())
    assert len(lines) > 5
    assert {place: flaw for place, words in lines if (flaw := flaw_of(words))} == {}


def test_no_line_gives_our_extras_to_a_package_of_another_name() -> None:
    assert [place for place, line in written_lines() if re.search(r"\bholdfast(-sdk)?\[[a-z]|@holdfast/", line)] == []


@pytest.mark.parametrize(
    "words", ["holdfast", "'holdfast[bench]'", "-U 'holdfast[torch]'", "holdfast-sdk", "-e '.[banch]'"]
)
def test_a_package_of_somebody_else_or_an_unknown_extra_is_found(words: str) -> None:
    assert flaw_of(words)


@pytest.mark.parametrize("origin", ["checkout", "wheel", "a wheel that was deleted", "index"])
def test_a_hint_names_the_place_that_this_installation_came_from(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some dist"
    folder.mkdir()
    wheel = folder / "holdfast_llm-0.1.0-py3-none-linux_x86_64.whl"
    if origin == "wheel":
        wheel.touch()
    monkeypatch.setattr(extras, "_origin", lambda: {"checkout": folder, "index": None}.get(origin, wheel))
    for extra in SERVER["optional-dependencies"]:
        command = extras.how_to_install(extra).partition("pip install ")[2]
        assert f"[{extra}]" in command
        if origin != "index":
            assert flaw_of(command) is None
            assert ("sdk" in command) == any(
                "sdk" in line or "client" in line for line in SERVER["optional-dependencies"][extra]
            )
        assert (str(folder) in command) == (origin in ("checkout", "wheel"))


def test_a_hint_in_an_environment_without_pip_names_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = extras.how_to_install("torch").partition(": ")[2]
    assert command.startswith(f"uv pip install --python {sys.executable} ")


def test_an_installation_knows_the_file_that_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "holdfast_llm-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: holdfast-llm\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert extras._origin() == REPOSITORY
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras._origin() is None
    (info / "direct_url.json").write_text(
        json.dumps({"url": "file:///my%20dist/holdfast_llm-0.1.0.whl", "archive_info": {}})
    )
    assert extras._origin() == Path("/my dist/holdfast_llm-0.1.0.whl")
