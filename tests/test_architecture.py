"""ARCHITECTURE.md names every source file, and only files that exist."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src" / "holdfast"
TEXT = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".js", ".css", ".html"}


def source_files() -> set[str]:
    files = (path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.suffix in SUFFIXES)
    return {str(path) for path in files if path.name != "__init__.py" and "gen" not in path.parts}


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def listed_files() -> list[str]:
    """The paths in the tables of the section `Files`: a heading names the room, the first column the file."""
    listed, room = [], ""
    for line in section("Files").splitlines():
        if heading := re.match(r"### `(.*?)/?`", line):
            room = "" if heading[1] == "holdfast" else f"{heading[1]}/"
        elif row := re.match(r"\| `([^`]+)` \|", line):
            listed.append(room + row[1])
    return listed


def test_every_source_file_is_listed_once() -> None:
    listed = listed_files()
    assert sorted(listed) == sorted(set(listed))
    assert source_files() - set(listed) == set(), "not in ARCHITECTURE.md"
    assert set(listed) - source_files() == set(), "in ARCHITECTURE.md, but not in src/holdfast"


def test_every_file_named_in_the_walks_and_the_table_of_changes_exists() -> None:
    names = {name for path in source_files() for name in (path, path.rpartition("/")[2])}
    text = section("Walks") + section("To change something")
    named = re.findall(r"`([\w/]+\.(?:py|cpp|h|cu))`", text)
    assert len(named) > 60
    assert [name for name in named if name not in names and not (REPOSITORY / name).exists()] == []


def test_the_table_of_changes_is_long_enough_to_be_useful() -> None:
    rows = [line for line in section("To change something").splitlines() if line.startswith("| ")]
    assert len(rows) - 1 >= 25  # without its heading
