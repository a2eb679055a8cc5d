"""tools/shape.py: its figures for a tree that is small enough to count by hand, and that it can trace turns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOL = Path(__file__).parents[1] / "tools" / "shape.py"

FILES = {
    "__init__.py": "",
    "errors.py": "class Gone(Exception):\n    pass\n\n\nclass _Only:\n    pass\n",
    "one/__init__.py": "",
    "one/errors.py": "class Gone(Exception):\n    pass\n",
    "one/turning.py": "import os\n\n\ndef long() -> str:\n    class _Only:\n        pass\n\n    return os.sep\n",
    "two/work.py": "class Worker:\n    async def run(self) -> None:\n        def inner() -> None:\n            pass\n",
    "two/gen/pb.py": "class Gone:\n    pass\n" * 100,
}


def shape(*args: str) -> Any:
    command = [sys.executable, str(TOOL), "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_figures_of_a_small_tree_are_those_counted_by_hand(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "made_up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = shape("--src", str(tmp_path / "made_up"))
    assert (found["files"], found["rooms"], found["lines"], found["nonblank_lines"]) == (6, 3, 20, 15)
    assert found["file_lines"] == {
        "count": 6,
        "median": 3.0,
        "p90": 8,
        "max": 8,
        "largest": [
            ["one/turning.py", 8],
            ["errors.py", 6],
            ["two/work.py", 4],
            ["one/errors.py", 2],
            ["__init__.py", 0],
        ],
    }
    assert found["function_lines"] == {
        "count": 3,
        "median": 3,
        "p90": 5,
        "max": 5,
        "largest": [["one/turning.py:4 long", 5], ["two/work.py:2 run", 3], ["two/work.py:3 inner", 2]],
    }
    assert found["ing_files"] == ["one/turning.py"]
    assert found["repeated_classes"] == {"Gone": ["errors.py:1", "one/errors.py:1"]}
    assert found["repeated_files"] == {"errors.py": ["errors.py", "one/errors.py"]}
    assert found["turns"] == {}


def test_traced_turns_run_code_on_the_threads_where_it_belongs() -> None:
    turns = shape("--trace")["turns"]
    assert set(turns) == {"chat turn, streamed", "chat turn, upstream", "gRPC turn"}
    for name, turn in turns.items():
        assert turn["loop"]["functions"] > turn["loop"]["files"] > 1
        assert turn["room_changes"] > 1
        assert (turn["engine"]["functions"] > 0) == (name != "chat turn, upstream")
        assert turn["all"]["functions"] >= turn["loop"]["functions"] + turn["engine"]["functions"]
        assert bool(turn["generators"]) == (name != "chat turn, upstream")
