"""Prints the shape of the code base: `python tools/shape.py [--src DIR] [--json] [--trace]`.

Without --trace it reads the source files only (generated ones, in folders named gen, are left out). A room is a folder
with Python files in it; a line of a function is any line from its `def` to its end.

With --trace it serves three turns in this process, on real sockets and with the fakes of tests/, and tells which code
each of them runs: a streamed chat turn over HTTP on our engine, a chat turn over HTTP through a fake SGLang, and a
gRPC turn. Each samples 16 tokens, comes after a first turn that warms up, and is kept in memory only (no data
directory). Counted are functions of the source tree without gen/ and testing/; lambdas and comprehensions are not
functions here. Every turn is made three times, and what happened in at least two of them counts. What the event loop
does while no turn runs (timers) is left out.

    functions, files  distinct ones entered: on the event loop's thread, on the engine's, on others, and on any
    room changes      the functions that the event loop's thread entered, in the order in which they were entered
                      first: how often the next one lies in another room; the fewest of the three times
    generators        how many async generators one token goes through on its way from the engine to the socket:
                      those that yield about once a token (at least three times for every four tokens)
"""

import argparse
import ast
import asyncio
import inspect
import json
import math
import statistics
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_TOKENS = 16
NUM_RUNS = 3
SETTLED_S = 0.05  # after a response, for what the server does once it is out
IDLE_S = 0.6  # longer than the server's frequent timers take to fire
WORDS = "one two three four five six seven eight nine ten red green blue white black brown"
NUM_LARGEST = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of files or functions, in lines."""

    count: int
    median: float
    p90: int
    max: int
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the source files alone tell."""

    files: int
    rooms: int
    lines: int
    nonblank_lines: int
    file_lines: Sizes
    function_lines: Sizes
    ing_files: tuple[str, ...]
    repeated_classes: dict[str, list[str]]
    repeated_files: dict[str, list[str]]


def shape_of(root: Path) -> Shape:
    file_lines: dict[str, int] = {}
    function_lines: dict[str, int] = {}
    classes: dict[str, list[str]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    nonblank = 0
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        if "gen" in where.parts[:-1]:
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        file_lines[str(where)] = len(lines)
        nonblank += sum(bool(line.strip()) for line in lines)
        if path.name != "__init__.py":
            names[path.name].append(str(where))
        tree = ast.parse(text)
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef):
                classes[statement.name].append(f"{where}:{statement.lineno}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function_lines[f"{where}:{node.lineno} {node.name}"] = (
                    (node.end_lineno or node.lineno) - node.lineno + 1
                )
    return Shape(
        files=len(file_lines),
        rooms=len({str(Path(where).parent) for where in file_lines}),
        lines=sum(file_lines.values()),
        nonblank_lines=nonblank,
        file_lines=_sizes(file_lines),
        function_lines=_sizes(function_lines),
        ing_files=tuple(where for where in file_lines if where.endswith("ing.py")),
        repeated_classes={name: found for name, found in sorted(classes.items()) if _num_files(found) > 1},
        repeated_files={name: found for name, found in sorted(names.items()) if len(found) > 1},
    )


def _num_files(places: Iterable[str]) -> int:
    return len({place.rpartition(":")[0] for place in places})


def _sizes(of: dict[str, int]) -> Sizes:
    if not of:
        return Sizes(0, 0, 0, 0, ())
    values = sorted(of.values())
    largest = sorted(of.items(), key=lambda item: -item[1])[:NUM_LARGEST]
    p90 = values[math.ceil(0.9 * len(values)) - 1]
    return Sizes(len(values), statistics.median(values), p90, values[-1], tuple(largest))


@dataclass(frozen=True, slots=True)
class Counts:
    functions: int
    files: int


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What one turn runs."""

    loop: Counts
    engine: Counts
    others: Counts
    all: Counts
    room_changes: int
    generators: tuple[str, ...]


@dataclass(slots=True)
class Run:
    """What was seen of one run of a turn: each thread's functions in the order of their first call, and yields."""

    functions: dict[int, dict[CodeType, None]] = field(default_factory=lambda: defaultdict(dict))
    yields: Counter[CodeType] = field(default_factory=Counter)


class Tracer:
    """Watches all threads that begin after `start`, and the one that calls it."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}/"
        self._ours: dict[CodeType, bool] = {}
        self._run: Run | None = None
        self._engine_threads: set[int] = set()

    def start(self) -> None:
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    async def turn(self, make: Callable[[], Awaitable[None]]) -> TurnShape:
        """The shape of the turn that `make` makes; it is made once unobserved, then NUM_RUNS times."""
        self._engine_threads.clear()
        await make()
        await asyncio.sleep(SETTLED_S)
        idle = await self._observed(lambda: asyncio.sleep(IDLE_S))
        return self._shape([await self._observed(make) for _ in range(NUM_RUNS)], idle)

    async def _observed(self, make: Callable[[], Awaitable[None]]) -> Run:
        run = self._run = Run()
        await make()
        await asyncio.sleep(SETTLED_S)
        self._run = None
        return run

    def _observe(self, frame: FrameType, event: str, arg: Any) -> None:
        run = self._run
        if run is None or event not in ("call", "return"):
            return
        code = frame.f_code
        if event == "call" and code.co_name == "forward":  # a fake engine's own code is not counted, its thread is told
            self._engine_threads.add(threading.get_ident())
        if code not in self._ours:
            self._ours[code] = self._is_ours(code)
        if not self._ours[code]:
            return
        if event == "call":
            run.functions[threading.get_ident()].setdefault(code)
        elif code.co_flags & inspect.CO_ASYNC_GENERATOR and type(arg).__name__ == "async_generator_wrapped_value":
            run.yields[code] += 1  # only a yield wraps its value, a suspended await does not

    def _is_ours(self, code: CodeType) -> bool:
        if not code.co_filename.startswith(self._root) or code.co_name.startswith("<"):
            return False
        return not {"gen", "testing"}.intersection(Path(code.co_filename[len(self._root) :]).parts[:-1])

    def _shape(self, runs: Sequence[Run], idle: Run) -> TurnShape:
        loop = threading.get_ident()
        on_loop = [[code for code in run.functions[loop] if code not in idle.functions[loop]] for run in runs]
        engine = self._engine_threads
        on_engine = [
            [code for thread in run.functions.keys() & engine for code in run.functions[thread]] for run in runs
        ]
        others = [run.functions.keys() - engine - {loop} for run in runs]
        on_others = [
            [code for thread in of for code in run.functions[thread]] for run, of in zip(runs, others, strict=True)
        ]
        entered = {"loop": _in_most(on_loop), "engine": _in_most(on_engine), "others": _in_most(on_others)}
        yielding = _in_most([[c for c, n in run.yields.items() if n >= 0.75 * NUM_TOKENS] for run in runs])
        rooms = [[Path(code.co_filename).parent for code in run if code in entered["loop"]] for run in on_loop]
        return TurnShape(
            **{name: _counts(codes) for name, codes in entered.items()},
            all=_counts([code for codes in entered.values() for code in codes]),
            room_changes=min(sum(one != other for one, other in pairwise(run)) for run in rooms),
            generators=tuple(f"{code.co_filename[len(self._root) :]} {code.co_qualname}" for code in yielding),
        )


def _in_most(runs: Sequence[Sequence[CodeType]]) -> list[CodeType]:
    """What is in more than half of the runs, in the order of the first of them."""
    found = Counter(code for run in runs for code in set(run))
    ordered = dict.fromkeys(code for run in runs for code in run)
    return [code for code in ordered if found[code] > len(runs) / 2]


def _counts(codes: Sequence[CodeType]) -> Counts:
    return Counts(len(set(codes)), len({code.co_filename for code in codes}))


async def traced_turns(tracer: Tracer) -> dict[str, TurnShape]:
    from holdfast_sdk import AsyncClient
    from tests.serving import ScriptedEngine, default_chat, serving, wordy_engine
    from tests.talking import client_of
    from tests.test_relay import chatting

    seed, plain = 7, wordy_engine()
    script = [default_chat().model.tokenizer.encode(f" {word}")[0] for word in WORDS.split()]  # a word, a chunk
    engine = ScriptedEngine({seed: script}, num_slabs=4, shape=plain.shape, vocab_size=plain.info.vocab_size)
    found = {}
    async with serving(engine, default_chat()) as server:
        async with client_of(server) as http:
            found["chat turn, streamed"] = await tracer.turn(await _chat(http, seed=seed, stream=True))
        async with AsyncClient(server.address) as client:
            session = await client.create_session(token_ids=[1, 2, 3])

            async def turn() -> None:
                sampled = [token async for token in await session.turn([4, 5], max_tokens=NUM_TOKENS, seed=seed)]
                assert len(sampled) == NUM_TOKENS

            found["gRPC turn"] = await tracer.turn(turn)
    async with chatting() as (relay, _):
        found["chat turn, upstream"] = await tracer.turn(await _chat(relay.http, seed=seed, stream=False))
    return found


async def _chat(http: Any, *, seed: int, stream: bool) -> Callable[[], Awaitable[None]]:
    """Makes the next turn of one conversation, each time it is called."""
    from tests.talking import as_events_text, chat_path, open_session, said, text_of

    session, texts = await open_session(http), ["Hello"]

    async def turn() -> None:
        body = said(*texts, max_tokens=NUM_TOKENS, seed=seed, **({"stream": True} if stream else {}))
        response = await http.post(chat_path(session), json=body)
        assert response.status_code == 200, response.text
        message = None if stream else response.json()["choices"][0]["message"]
        texts.extend([message["content"] if message else text_of(as_events_text(response.text)), "More"])

    return turn


def trace(root: Path) -> dict[str, TurnShape]:
    repository = root.parents[1] if (root.parents[1] / "tests" / "serving.py").exists() else REPOSITORY
    sys.path[:0] = [str(root.parent), str(repository)]
    import holdfast

    assert Path(holdfast.__file__).resolve().parent == root, f"{holdfast.__file__} is imported, not {root}"
    tracer = Tracer(root)
    tracer.start()
    try:
        return asyncio.run(traced_turns(tracer))
    finally:
        tracer.stop()


def text(root: Path, shape: Shape, turns: dict[str, TurnShape]) -> str:
    lines = [
        f"{root}: {shape.files} files in {shape.rooms} rooms, {shape.lines} lines, {shape.nonblank_lines} not blank",
        "",
        *_told("lines per file", shape.file_lines),
        *_told("lines per function", shape.function_lines),
        "",
        *_listed("files named *ing.py", shape.ing_files),
        *_listed("classes defined in several files", _with_places(shape.repeated_classes)),
        *_listed("file names in several rooms", _with_places(shape.repeated_files)),
    ]
    for name, turn in turns.items():
        lines += [
            f"{name}, {NUM_TOKENS} tokens",
            *(
                f"  {where + ':':<13}{counts.functions:>4} functions in {counts.files} files"
                for where, counts in (
                    ("event loop", turn.loop),
                    ("engine", turn.engine),
                    ("others", turn.others),
                    ("sum", turn.all),
                )
            ),
            f"  room changes {turn.room_changes:>4} (event loop, functions in the order of their first call)",
            f"  generators   {len(turn.generators):>4} a token",
            *(f"    {generator}" for generator in turn.generators),
            "",
        ]
    return "\n".join(lines).rstrip()


def _told(name: str, sizes: Sizes) -> list[str]:
    head = f"{name}: median {sizes.median:g}, p90 {sizes.p90}, max {sizes.max}, of {sizes.count}"
    return [head, *(f"  {num_lines:>5} {where}" for where, num_lines in sizes.largest)]


def _listed(name: str, items: Sequence[str]) -> list[str]:
    return [f"{name}: {len(items)}", *(f"  {item}" for item in items), ""]


def _with_places(found: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(places)}" for name, places in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the shape of the code base.")
    parser.add_argument("--src", type=Path, default=REPOSITORY / "src" / "holdfast", help="the package to look at")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trace", action="store_true", help="also serve three turns and count the code that they run")
    args = parser.parse_args()
    root = args.src.resolve()
    shape, turns = shape_of(root), trace(root) if args.trace else {}
    if args.json:
        print(json.dumps(asdict(shape) | {"turns": {name: asdict(turn) for name, turn in turns.items()}}, indent=2))
    else:
        print(text(root, shape, turns))


if __name__ == "__main__":
    main()
