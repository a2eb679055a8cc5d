"""Show the failures of a JUnit XML report as GitHub annotations and in the job summary."""

import os
import re
import sys
import xml.etree.ElementTree as ET
from typing import NamedTuple

# Both `tests/test_x.py:12: in test_y` and `File "tests/test_x.py", line 12`.
FRAME = re.compile(r'(?:^|File ")([^\s":][^":\n]*\.py)(?::|", line )(\d+)', re.MULTILINE)


class Failure(NamedTuple):
    test: str
    message: str
    file: str
    line: str


def locate(text: str) -> tuple[str, str]:
    """The last frame in this project's own files: installed packages have no place in a diff."""
    frames = [(os.path.relpath(file), line) for file, line in FRAME.findall(text)]
    own = [frame for frame in frames if not frame[0].startswith(("..", ".venv"))]
    return own[-1] if own else ("", "")


def failures(root: ET.Element) -> list[Failure]:
    found = []
    for case in root.iter("testcase"):
        test = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        for node in (*case.findall("failure"), *case.findall("error")):
            text = (node.text or "").strip()
            # For a file that cannot be imported, pytest puts the reason in the last line of the text.
            reason = text.rpartition("\n")[2].removeprefix("E   ")
            why = node.get("message", "").replace("collection failure", reason)
            found.append(Failure(test, why or text or node.tag, *locate(text)))
    return found


def escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def annotation(failure: Failure) -> str:
    values = {"file": failure.file, "line": failure.line, "title": failure.test}
    pairs = (f"{key}={escape(v).replace(':', '%3A').replace(',', '%2C')}" for key, v in values.items() if v)
    return f"::error {','.join(pairs)}::{escape(failure.message)}\n"


def cell(text: str) -> str:
    """One table cell: short, on one line, with nothing Markdown or HTML would read as markup."""
    return re.sub(r"[|<>&*_`~\[\]\\#$@]", lambda found: f"&#{ord(found[0])};", " ".join(text.split())[:300])


def summary(tests: int, found: list[Failure]) -> str:
    table = "\n| Test | Where | Message |\n| --- | --- | --- |\n" if found else ""
    for test, message, file, line in found:
        table += f"| {cell(test)} | {cell(f'{file}:{line}'.strip(':'))} | {cell(message)} |\n"
    return f"{tests} tests, {len(found)} failures\n{table}"


def main(report: str) -> int:
    try:
        root = ET.parse(report).getroot()
    except (OSError, ET.ParseError, ValueError, LookupError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not XML, {error}"
        print(f"Cannot read the test report {report}: {reason}.", file=sys.stderr)
        return 2
    found = failures(root)
    sys.stdout.writelines(map(annotation, found))
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(target, "a", encoding="utf-8") as out:
            out.write(summary(len(list(root.iter("testcase"))), found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
