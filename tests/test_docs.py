"""What the documents say works: blocks are run, links followed, tables compared with the code."""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.cli import main
from holdfast.config import ChatConfig, EngineConfig, ServeConfig, UpstreamConfig
from tests.documents import ROOT, Block, Reader, blocks_of, documents, flaw_of, links_of, missing_in, reading

SERVING = ROOT / "docs/operations/serving.md"
SETTINGS = ROOT / "docs/operations/settings.md"
CONFIGS: tuple[type[Any], ...] = (ServeConfig, ChatConfig, EngineConfig, UpstreamConfig)
SERVE = ".venv/bin/holdfast serve --recent 512 --snapshot-memory-mb 64"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Someone with a server that runs, for documents that begin there."""
    with reading(tmp_path_factory.mktemp("reader")) as reader:
        reader.serve(SERVE)
        yield reader


def _follow(reader: Reader, blocks: list[Block]) -> list[str]:
    """Run the blocks in order; every output is what stands below its block."""
    outputs = []
    for block in blocks:
        output = reader.type(block)
        missing = missing_in(output, block.shown)
        assert missing is None, f"line {block.line}: {missing!r} is not in\n{output}"
        outputs.append(output)
    return outputs


def _example(reader: Reader, name: str, *arguments: str, said: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        input=said,
        cwd=reader.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_quickstart_works_from_its_first_block_to_its_last(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        outputs = _follow(reader, blocks_of(ROOT / "docs/quickstart.md", "bash", "python"))
    computed = [int(number) for number in re.findall(r"(\d+) computed", "".join(outputs))]
    sent = [int(number) for number in re.findall(r"(\d+) prompt tokens", "".join(outputs))]
    assert sent == sorted(set(sent))  # the conversation grows, also over the restart
    assert max(computed[1:]) <= 24 < computed[0]  # what it costs does not


@pytest.mark.slow
def test_the_tour_of_a_cluster_works(tmp_path: Path, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/operations/cluster.md"
    monkeypatch.setenv("HOLDFAST_JOURNAL", postgres)
    (command,) = [block for block in blocks_of(page, "sh") if "--member tour" in block.text]
    before, after = blocks_of(page, "python")
    with reading(tmp_path) as reader:
        banner = reader.type(command)
        assert missing_in(banner, command.shown) is None
        _follow(reader, [before])
        for pid in re.findall(r"tour-1 \(pid (\d+)\)", banner):
            os.kill(int(pid), signal.SIGKILL)
        while _states(f"http://{reader.http}/cluster") != ["serving", "serving"]:
            time.sleep(0.1)
        _follow(reader, [after])


def _states(url: str) -> list[str]:
    """Of a cluster's members; none where the connection was the dead one's."""
    try:
        return [member["state"] for member in httpx.get(url).json()["members"]]
    except httpx.TransportError:
        return []


def test_the_two_commands_of_the_readme_exist() -> None:
    """Not run here: one serves for ever, the other runs these tests."""
    (block,) = blocks_of(ROOT / "README.md", "bash")
    targets = re.findall(r"^make (\w+)", block.text, re.MULTILINE)
    assert targets == ["serve", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("name", ["README.md", "docs/sessions.md", "docs/grpc.md", "docs/openai.md"])
def test_python_in_the_documents_runs(reader: Reader, name: str) -> None:
    blocks = blocks_of(ROOT / name, "python")
    assert blocks
    _follow(reader, blocks)


@pytest.mark.parametrize(
    "name", ["README.md", "docs/quickstart.md", "docs/sessions.md", "docs/grpc.md", "docs/openai.md"]
)
def test_a_reader_learns_which_python_has_the_packages_before_the_first_block(name: str) -> None:
    assert ".venv/bin/python" in (ROOT / name).read_text(encoding="utf-8").partition("```python")[0]


def test_the_picture_of_the_readme_is_drawn_from_the_figures_beside_it() -> None:
    picture = ROOT / "docs/images/turn-latency.svg"
    spec = importlib.util.spec_from_file_location("plot_turns", ROOT / "tools/plot_turns.py")
    assert spec
    assert spec.loader
    plot_turns = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot_turns)
    kept = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    assert plot_turns.svg(kept) == picture.read_text(encoding="utf-8")
    assert f"({picture.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_of_the_readme_have_15_lines_at_most() -> None:
    for block in blocks_of(ROOT / "README.md", "python", "ts"):
        assert len(block.text.splitlines()) <= 15


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    flaws = {link: flaw for link in links_of(path) if (flaw := flaw_of(path, link))}
    assert not flaws


def _missing_citations(path: Path) -> set[str]:
    """Files of this repository that a decision names, and that do not exist; decisions by their number."""
    text = path.read_text(encoding="utf-8")
    cited = set(re.findall(r"[\w./-]*\w\.(?:md|py|cpp|h|sh|ts|toml|txt|json|proto|yaml)\b", text))
    known = [str(file.relative_to(ROOT)) for folder in ("src", "tests", "tools", "docs", "sdks", "proto", "examples")
             for file in (ROOT / folder).rglob("*")] + [file.name for file in ROOT.iterdir()]  # fmt: skip
    missing = {name for name in cited if not any(f"/{file}".endswith(f"/{name.lstrip('./')}") for file in known)}
    numbers = re.findall(r"[Dd]ecision (\d+)", text)
    return missing | {number for number in numbers if not list((ROOT / "docs/decisions").glob(f"{int(number):04}-*"))}


def test_decisions_cite_only_what_exists(tmp_path: Path) -> None:
    page = tmp_path / "0099-page.md"
    page.write_text("See docs/no-such.md, `engine/weights.py`, `Slab.can_rewind`, decision 3 and decision 99.\n")
    assert _missing_citations(page) == {"docs/no-such.md", "99"}
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert {path.name: missing for path in pages if (missing := _missing_citations(path))} == {}


def _commands(path: Path) -> list[str]:
    """What a document tells its reader to type after `holdfast`: in blocks, and in sentences where a flag is given."""
    text = path.read_text(encoding="utf-8")
    typed = re.findall(r"^(?:[\w./]+/)?holdfast +(\w[^\n\[]*)$", text, re.MULTILINE)
    inline = re.findall(r"`(?:[\w./]+/)?holdfast +(\w[^`\n]*? --[a-z][^`\n|\[]*)`", text)
    return [line for line in typed + inline if "..." not in line and not re.search(r" --[a-z-]+$", line)]


def test_every_command_in_the_documents_is_one_that_holdfast_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def only_parsed(self: argparse.ArgumentParser, *given: Any) -> tuple[argparse.Namespace, list[str]]:
        arguments, unknown = parse(self, *given)
        arguments.run = lambda _: 0
        return arguments, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", only_parsed)
    pages = [path for path in documents() if path.is_relative_to(ROOT / "docs") or path.parent == ROOT]
    commands = [(path, line) for path in pages if path.name != "CHANGELOG.md" for line in _commands(path)]
    assert len(commands) > 15
    for path, line in commands:
        try:
            assert main(shlex.split(os.path.expandvars(line), comments=True)) == 0
        except SystemExit:
            pytest.fail(f"{path.relative_to(ROOT)}: holdfast {line}")


def test_every_document_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links_of(index)}
    pages = {path for path in documents() if path.is_relative_to(ROOT / "docs") and path.parent.name != "decisions"}
    assert pages - {index} <= linked


def test_the_table_of_metrics_is_what_the_server_exposes(reader: Reader) -> None:
    exposed = httpx.get(f"http://{reader.http}/metrics").text
    names = set(re.findall(r"^# TYPE (holdfast_\w+) ", exposed, re.MULTILINE))
    names -= {name for name in names if name.endswith("_created")}  # written by the library for each counter
    section = SERVING.read_text(encoding="utf-8").partition("## Monitoring")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    listed = {f"holdfast_{name}" for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert listed == names


def test_the_table_of_metrics_names_their_labels() -> None:
    from holdfast.metrics import Metrics

    text = SERVING.read_text(encoding="utf-8")
    for collector in vars(Metrics()).values():
        for label in getattr(collector, "_labelnames", ()):
            name = collector._name.removeprefix("holdfast_") + "(_total)?"  # of a counter
            assert re.search(rf"`{name}{{[^}}]*\b{label}\b[^}}]*}}`", text), f"{name} has the label {label}"


@pytest.mark.parametrize("config", CONFIGS)
def test_the_tables_of_settings_have_every_flag_and_its_default(config: type[Any]) -> None:
    text = SETTINGS.read_text(encoding="utf-8")
    for field in dataclasses.fields(config):
        names = ["--" + field.name.replace("_", "-"), *field.metadata["aliases"]]
        row = f"| {', '.join(f'`{name}`' for name in names)} | {_shown(field.default)} |"
        assert f"\n{row}" in text, f"a row should begin with {row}"
        for choice in field.metadata["choices"] or ():
            assert re.search(rf"^{re.escape(row)}.*`{choice}`", text, re.MULTILINE), f"{choice} is missing in {row}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "-"


def test_no_setting_is_listed_that_does_not_exist() -> None:
    known = {
        field.name
        for config in (ServeConfig, ChatConfig, EngineConfig, UpstreamConfig)
        for field in dataclasses.fields(config)
    }
    listed = re.findall(r"^\| `--([\w-]+)`", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name.replace("-", "_") for name in listed} == known


def test_the_agent_calls_its_tools_and_goes_on_with_its_session(reader: Reader) -> None:
    server = f"http://{reader.http}"
    said = _example(reader, "agent.py", "--server", server, "--tool-choice", "calculate", said="What is 12 * 30?\n")
    assert re.search(r'calculate \{ ?"left": .* -> 360\n.*360', said)
    assert "<tool" not in said
    session = re.search(r"session (\w+)", said)
    assert session
    again = _example(
        reader,
        "agent.py",
        "--server",
        server,
        "--session",
        session[1],
        "--tool-choice",
        "list_files",
        said="Which files?\n",
    )
    assert again.count("Makefile") >= 2  # the tool says it, and then the model
    assert "<tool" not in again
    cached = [int(number) for number in re.findall(r"(\d+) cached tokens", again)]
    assert min(cached) > 100


def test_the_best_of_n_comes_from_one_prompt(reader: Reader) -> None:
    said = _example(reader, "best_of_n.py", "--server", reader.grpc, "-n", "3", "--max-tokens", "6")
    assert said.count(" 1 prefilled ") == 3
    assert "kept: session" in said
    left = httpx.get(f"http://{reader.http}/sessions").json()["data"]
    assert "best of n" not in {session["label"] for session in left}


def test_langchain_works_on_a_session(reader: Reader) -> None:
    pytest.importorskip("langchain_openai")
    said = _example(reader, "langchain_session.py", f"http://{reader.http}")
    assert said.count("cached tokens") == 2
    assert "population {'country': " in said


@pytest.mark.slow
def test_the_rollout_trains_on_its_samples(reader: Reader) -> None:
    assert "tokens trained" in _example(reader, "rollout.py", f"http://{reader.http}")


def test_output_is_compared_loosely_and_in_order() -> None:
    assert missing_in("a 17 b\nc", "a 3 b\nc") is None
    assert missing_in("c\na 17 b", "a 3 b\nc") == "c"
    assert missing_in("logprob -1.5e-05", "logprob -0.25") is None
    assert missing_in("session 7f3a is open", "session ... is open") is None
    assert missing_in("Rome", "Paris") == "Paris"


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    assert flaw_of(readme, "docs/no-such.md") == "does not exist"
    assert flaw_of(readme, "ARCHITECTURE.md#no-such-heading") == "has no heading 'no-such-heading'"
    assert flaw_of(readme, "../outside.md") == "leaves the repository"
    assert flaw_of(readme, "docs/operations/serving.md#what-survives") is None
    page = tmp_path / "page.md"
    page.write_text("[a](b.md#c) ![p](p.png) [w](https://x.y) `[no](z.md)`\n```\n[no](q.md)\n```\n", encoding="utf-8")
    assert links_of(page) == ["b.md#c", "p.png"]
