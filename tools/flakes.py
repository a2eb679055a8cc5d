"""Runs a pytest command many times on a busy machine and tells which tests failed in which run.

    python tools/flakes.py --runs 20 -- -n 2 -q -m "not slow" tests/

Everything after -- goes to pytest. While the runs last, one busy loop for each core takes processor time from them
(--busy 0: none). The output of every run is kept in a folder that is named at the end. Exit status: 0 where all runs
passed, 1 where one failed (a run that collects no test fails), 130 after Ctrl-C, which still prints the runs so far.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

# A loop looks for its parent now and then, so that it ends even where the parent was killed.
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"
ENDING_S = 20


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one run. `failed`: ids of tests that failed, or what else was wrong."""

    number: int
    num_tests: int
    duration_s: float
    failed: tuple[str, ...]

    def __str__(self) -> str:
        outcome = f"{len(self.failed)} failed" if self.failed else "passed"
        return f"run {self.number:3}  {self.duration_s:7.1f} s  {self.num_tests:5} tests  {outcome}"


@contextlib.contextmanager
def busy_loops(num_loops: int) -> Iterator[None]:
    """Keeps `num_loops` cores busy for as long as the context lasts."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_loops):
            loops.append(subprocess.Popen([sys.executable, "-c", BUSY_LOOP]))
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def run_pytest(number: int, pytest_args: Sequence[str], folder: Path) -> Run:
    """Runs pytest once. Its output goes to run-NNN.txt in `folder`, its results to run-NNN.xml."""
    results = folder / f"run-{number:03}.xml"
    command = [sys.executable, "-m", "pytest", f"--junit-xml={results}", "-o", "junit_family=xunit1", *pytest_args]
    started = time.monotonic()
    with results.with_suffix(".txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C reaches pytest too; other signals only reach us
            process.terminate()
            process.wait(ENDING_S)
            raise
    duration_s = time.monotonic() - started
    num_tests, failed = read_results(results) if results.exists() else (0, [])
    if code and not failed:
        failed = [f"pytest exited with status {code}"]
    return Run(number, num_tests, duration_s, tuple(failed))


def read_results(path: Path) -> tuple[int, list[str]]:
    """The number of tests in a JUnit file, and the ids of those that failed."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return len(cases), sorted({f"{case.get('file') or case.get('classname')}::{case.get('name')}" for case in bad})


def print_summary(runs: Sequence[Run], folder: Path) -> None:
    print("\n".join(["", *map(str, runs)]))
    for test in sorted({test for run in runs for test in run.failed}):
        print(f"FAILED {test}: run", ", ".join(str(run.number) for run in runs if test in run.failed))
    num_bad = sum(bool(run.failed) for run in runs)
    print(f"{num_bad} of {len(runs)} runs failed; output in {folder}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="number of runs (default 10)")
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="number of busy loops (default: one a core)")
    parser.add_argument("pytest_args", nargs="+", metavar="-- PYTEST_ARG", help="what pytest is called with")
    options = parser.parse_args()

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    folder, runs = Path(tempfile.mkdtemp(prefix="flakes-")), list[Run]()
    try:
        with busy_loops(options.busy):
            for number in range(1, options.runs + 1):
                runs.append(run_pytest(number, options.pytest_args, folder))
                print(runs[-1], flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        print_summary(runs, folder)
    return int(any(run.failed for run in runs) or not runs)


if __name__ == "__main__":
    raise SystemExit(main())
