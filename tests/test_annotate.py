"""The script that shows test failures on GitHub."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / ".github" / "scripts" / "annotate.py"


@pytest.fixture
def annotate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, run in an empty directory and away from the summary of a real CI job."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("annotate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(tmp_path: Path, body: str) -> str:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>", encoding="utf-8")
    return str(report)


def test_one_escaped_line_per_failure(annotate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = write(
        tmp_path,
        '<testcase classname="tests.test_a" name="test_x[1,2]">'
        '<failure message="50% off&#10;second line">def test_x():\n'
        "tests/test_a.py:12: in test_x\n"
        ".venv/lib/python3.11/site-packages/lib.py:3: AssertionError</failure></testcase>"
        '<testcase name="test_ok"/><testcase name="setup"><error>no place\r\nknown</error></testcase>'
        '<testcase name="b"><error message="collection failure">b.py:1: in x\nE   EOFError: c</error>'
        "</testcase>",
    )
    assert annotate.main(report) == 0
    assert capsys.readouterr().out.splitlines() == [
        "::error file=tests/test_a.py,line=12,title=tests.test_a.test_x[1%2C2]::50%25 off%0Asecond line",
        "::error title=setup::no place%0Aknown",  # XML itself turns CR LF into LF
        "::error file=b.py,line=1,title=b::EOFError: c",
    ]


@pytest.mark.parametrize("folder", ["", "{cwd}/"])
def test_place_from_a_plain_traceback(annotate: ModuleType, tmp_path: Path, folder: str) -> None:
    text = f'  | File "{folder.format(cwd=tmp_path)}src/holdfast/x.py", line 7, in f\n  | ValueError'
    assert annotate.locate(text) == ("src/holdfast/x.py", "7")


def test_summary_is_one_safe_table(annotate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "summary.md"
    target.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    report = write(tmp_path, '<testcase name="t"><failure message="a | b&#10;&lt;c&gt;"/></testcase>')
    assert annotate.main(report) == 0
    assert target.read_text(encoding="utf-8").splitlines() == [
        "before",
        "1 tests, 1 failures",
        "",
        "| Test | Where | Message |",
        "| --- | --- | --- |",
        "| t |  | a &#124; b &#60;c&#62; |",
    ]


@pytest.mark.parametrize("content", [None, "", "not xml", '<?xml version="1.0" encoding="no-such"?><a/>'])
def test_unreadable_report_is_one_sentence(
    annotate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    report = tmp_path / "report.xml"
    if content is not None:
        report.write_text(content, encoding="utf-8")
    assert annotate.main(str(report)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Cannot read the test report {report}: ")
    assert captured.err.count("\n") == 1
