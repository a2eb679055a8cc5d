"""tools/flakes.py: it finds the run in which a test failed, and leaves no busy loop behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "flakes.py"

SECOND_RUN_FAILS = """
from pathlib import Path

def test_steady():
    pass

def test_second_time():
    marks = Path(__file__).with_suffix(".marks")
    with marks.open("a") as file:
        file.write(".")
    assert marks.read_text() != ".."
"""


def start(path: Path, *args: str) -> "subprocess.Popen[str]":
    """The tool on one file of tests, in a process group of its own, with a pytest that needs no plugin."""
    command = [sys.executable, str(TOOL), *args, "--", "-c", os.devnull, "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TMPDIR": str(path.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - ours may be ignored
        cwd=path.parent,
        env=environment,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def num_of_group(group: int) -> int:
    """Processes of a group that still run."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return sum(row[0] == str(group) and not row[1].startswith("Z") for row in rows)


def test_a_test_that_fails_now_and_then_is_named_with_its_run(tmp_path: Path) -> None:
    path = tmp_path / "test_sometimes.py"
    path.write_text(SECOND_RUN_FAILS)
    tool = start(path, "--runs", "3", "--busy", "1")
    output, _ = tool.communicate(timeout=120)
    assert tool.returncode == 1
    lines = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert lines == ["FAILED test_sometimes.py::test_second_time: run 2"]
    assert output.splitlines()[-1].startswith("1 of 3 runs failed; output in ")
    assert num_of_group(tool.pid) == 0


def test_runs_that_all_pass_exit_0_and_a_run_of_nothing_1(tmp_path: Path) -> None:
    path = tmp_path / "test_steady.py"
    path.write_text("def test_steady():\n    pass\n")
    tool = start(path, "--runs", "1", "--busy", "0")
    assert "0 of 1 runs failed" in tool.communicate(timeout=120)[0]
    assert tool.returncode == 0
    path.write_text("")
    tool = start(path, "--runs", "1", "--busy", "0")
    assert "FAILED pytest exited with status 5: run 1" in tool.communicate(timeout=120)[0]
    assert tool.returncode == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_busy_loops_end_with_the_tool_however_it_ends(tmp_path: Path, number: signal.Signals, code: int) -> None:
    path = tmp_path / "test_long.py"
    path.write_text(
        "import time\nfrom pathlib import Path\n\ndef test_long():\n"
        "    Path(__file__).with_suffix('.began').touch()\n    time.sleep(20)\n"
    )
    with start(path, "--runs", "1", "--busy", "2") as tool:
        try:
            wait_for(lambda: path.with_suffix(".began").exists())
            assert num_of_group(tool.pid) == 4  # the tool, pytest and two loops
            tool.send_signal(number)
            assert tool.wait(60) == code
            wait_for(lambda: num_of_group(tool.pid) <= (number == signal.SIGKILL))  # nobody is left to end pytest
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tool.pid, signal.SIGKILL)
