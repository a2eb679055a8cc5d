"""`holdfast run`: an agent on a session of its own, its exit code and signals, and the tree that is shown."""

import http.server
import json
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.bench.processes import serving
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import decode
from holdfast.cli import main
from holdfast.cli.run import Place, agent_environment, tree_lines
from tests.serving import Server, default_chat, serving_aside, wordy_engine
from tests.test_cli import COMMAND, CTRL_C, Terminal

# Agents: two conversations by the openai package, and one by plain HTTP
OPENAI_AGENT = """
import os, openai
client = openai.OpenAI()
messages = [{"role": "user", "content": "<system-reminder>Be kind.</system-reminder>What\\nis this?"}]
for _ in range(2):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=3)
    messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
client.chat.completions.create(model="any", messages=[{"role": "user", "content": "A title"}], max_tokens=2)
raise SystemExit(3)
"""
HTTP_AGENT = """
import json, os, urllib.request
body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
print(json.load(urllib.request.urlopen(request))["choices"][0]["finish_reason"])
"""
WAITING_AGENT = """
import signal, sys
def stop(number, frame):
    print("stopped by", number, flush=True)
    sys.exit(5)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
print("waiting", flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_aside(wordy_engine(num_slabs=8, forward_s=0), default_chat()) as server:
        yield server


def python(program: str) -> list[str]:
    return ["--", sys.executable, "-c", program]


def test_the_exit_code_is_the_commands_and_its_conversations_are_shown(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "run.safetensors"
    options = ["--server", server.http, "--label", "mine", "--samples", str(samples)]
    assert main(["run", *options, *python(OPENAI_AGENT)]) == 3
    session, first, second, written = capfd.readouterr().err.splitlines()
    assert session.endswith("3 length")
    assert "2 conversations, 3 turns" in session
    assert first.startswith('├─ turns 1 to 2 "What is this?": 2 turns, ')
    assert second.startswith('└─ turn 3 "A title": 1 turn, ')
    assert written == f"samples: {samples}"
    export = decode(samples.read_bytes())
    assert (len(export.samples), problems(export)) == (2, [])
    assert export.samples[0].label == "mine"


def test_without_a_server_one_is_started_and_ends_with_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *python(HTTP_AGENT + 'print(os.environ["CLAUDE_CODE_AUTO_COMPACT_WINDOW"])')]) == 0
    shown = capfd.readouterr()
    assert shown.out == "length\n7684\n"  # the whole context of the bundled model, less what may be pinned
    assert "1 conversation, 1 turn" in shown.err
    assert "pass --samples FILE" in shown.err


def test_what_is_kept_can_be_served_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = ["--data-dir", str(tmp_path / "data"), "--sessions", "2", "--recent", "256"]
    assert main(["run", *data, *python(HTTP_AGENT)]) == 0
    session, _, serve, samples = capfd.readouterr().err.splitlines()
    flags = shlex.split(serve.rpartition(" serve ")[2])
    with serving("--sessions", "2", "--recent", "256", *flags) as again:
        command = samples.removeprefix("to get its samples: ").replace("http://127.0.0.1:8000", again.http)
        subprocess.run(["sh", "-c", command], check=True, capture_output=True, cwd=tmp_path)
    (sample,) = decode((tmp_path / f"{session.split()[1][:-1]}.safetensors").read_bytes()).samples
    assert len(sample.turns) == 1


def test_the_session_on_a_running_server_stays_and_the_hint_gets_its_samples(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://{server.http}/v1")
    assert main(["run", *python(HTTP_AGENT)]) == 0
    command = capfd.readouterr().err.splitlines()[-1].removeprefix("to get its samples: ")
    subprocess.run(["sh", "-c", command], check=True, capture_output=True, cwd=tmp_path)
    (written,) = tmp_path.iterdir()
    assert len(decode(written.read_bytes()).samples) == 1


def test_a_command_that_sends_nothing_is_told_so(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--server", server.http, "--samples", "none.json", "true"]) == 0
    assert "does it read OPENAI_BASE_URL" in capfd.readouterr().err
    assert not Path("none.json").exists()


def test_a_signal_reaches_the_command_and_the_report_still_comes(server: Server) -> None:
    command = [*COMMAND, "run", "--server", server.http, *python(WAITING_AGENT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (5, f"stopped by {signal.SIGTERM:d}\n")
    assert "session " in errors


def test_ctrl_c_is_for_the_command_once(server: Server) -> None:
    with Terminal(*COMMAND, "run", "--server", server.http, *python(WAITING_AGENT)) as terminal:
        terminal.until("waiting")
        terminal.type(CTRL_C)
        terminal.until(f"stopped by {signal.SIGINT:d}")
        terminal.until("does it read")
        assert terminal.ended() == 5
        assert "stopped by" not in terminal.seen


def test_a_command_that_a_signal_ended_has_the_exit_code_of_a_shell(server: Server) -> None:
    assert main(["run", "--server", server.http, "--", "sh", "-c", "kill -9 $$"]) == 128 + 9


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        ([], 2, "pass the command to run"),
        (["--", "no-such-agent"], 127, "command not found"),
        (["--", "./README.md"], 126, "not executable"),
        (["--server", "127.0.0.1:1", "--", "true"], 1, "no answer from 127.0.0.1:1"),
        (["--server", "x", "--keep", "--", "true"], 2, "--keep is for a server that is started"),
        (["--server", "x", "--recent", "9", "--", "true"], 2, "--recent is for a server that is started"),
        (["--samples", "a.txt", "--", "true"], 2, "the name must end in .json"),
        (["--samples", "nowhere/a.json", "--", "true"], 2, "there is no directory nowhere"),
        (["--model", "no-such-model", "--", "true"], 2, "no-such-model"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_anything_runs(
    arguments: list[str], status: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == status
    assert problem in capfd.readouterr().err


def test_a_server_without_forests_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Old(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "m", "max_model_len": 9}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(400, {"error": {"message": "history is not supported here"}})

        def _answer(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as old:
        thread = threading.Thread(target=old.serve_forever)
        thread.start()
        try:
            assert main(["run", "--server", f"127.0.0.1:{old.server_port}", "--", "true"]) == 1
        finally:
            old.shutdown()
            thread.join()
    assert "this server has no forest sessions" in capfd.readouterr().err


# Without a server


def environment(program: str, directory: Path, given: dict[str, str] | None = None) -> dict[str, str]:
    place = Place(url="http://h/sessions/s", key="k", model='a "b"', context=1000, directory=directory)
    return agent_environment(given or {}, place, program)


def test_agents_find_the_session_in_their_environment_and_in_files_of_a_directory(tmp_path: Path) -> None:
    found = environment("/bin/python", tmp_path, {"PATH": "/bin", "ANTHROPIC_AUTH_TOKEN": "own", "NO_PROXY": "h"})
    assert found["PATH"] == "/bin"
    assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == "http://h/sessions/s/v1"
    assert found["ANTHROPIC_BASE_URL"] == "http://h/sessions/s"
    assert (found["OPENAI_API_KEY"], found["ANTHROPIC_API_KEY"]) == ("k", "k")
    assert "ANTHROPIC_AUTH_TOKEN" not in found
    assert found["NO_PROXY"] == "h,127.0.0.1,localhost"
    codex = tomllib.loads((Path(found["CODEX_HOME"]) / "config.toml").read_text())
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], provider["base_url"]) == ('a "b"', "http://h/sessions/s/v1")
    assert provider["wire_api"] == "responses"
    opencode = json.loads(found["OPENCODE_CONFIG_CONTENT"])
    assert opencode["provider"]["holdfast"]["options"] == {"baseURL": "http://h/sessions/s/v1", "apiKey": "k"}
    assert json.loads(Path(found["QWEN_CODE_SYSTEM_SETTINGS_PATH"]).read_text())["security"]
    assert {path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("*")} == {"codex", "qwen"}


def test_claude_code_gets_a_token_and_no_key(tmp_path: Path) -> None:
    found = environment("/opt/claude", tmp_path, {"ANTHROPIC_API_KEY": "own"})
    assert found["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert "ANTHROPIC_API_KEY" not in found


def turn(number: int, parent: int = 0, reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {
        "turn": number,
        "parent": parent,
        "given_tokens": 1000,
        "sampled_tokens": 10,
        "finish_reason": reason,
    } | more


def told(*turns: dict[str, Any], **openings: str) -> list[str]:
    roots = [{"root": int(root.removeprefix("r")), "opening": text} for root, text in openings.items()]
    return tree_lines({"session_id": "s", "conversations": roots, "metadata": {"tree": list(turns)}})


def test_a_tree_is_shown_by_conversation_and_branch() -> None:
    turns = [
        *(turn(1, reason="tool_calls"), turn(2), turn(3, 1, "tool_calls"), turn(4, 3)),
        *(turn(5, 3, "length", edited=True), turn(6, 5), turn(7)),
    ]
    assert told(*turns, r1="Fix\x1b[1m\nit " + "please " * 20, r2="Title", r7="") == [
        "session s: 3 conversations, 7 turns, 7,070 tokens (70 sampled): 2 tool_calls, 4 stop, 1 length",
        '├─ turns 1 to 3 "Fix [1m it please please please please please please plea...": '
        "2 turns, 2,020 tokens (20 sampled): 2 tool_calls",
        "│  ├─ turn 4: 1 turn, 1,010 tokens (10 sampled): 1 stop",
        "│  └─ turns 5 to 6: edited, 2 turns, 2,020 tokens (20 sampled): 1 length, 1 stop",
        '├─ turn 2 "Title": 1 turn, 1,010 tokens (10 sampled): 1 stop',
        "└─ turn 7: 1 turn, 1,010 tokens (10 sampled): 1 stop",
    ]


def test_a_large_tree_is_shown_in_part() -> None:
    wide = told(*(turn(number) for number in range(1, 1001)))
    assert wide[-1] == "... and 800 more"
    deep = told(*(turn(number, max(0, number // 2 * 2 - 1)) for number in range(1, 5001)))
    assert len(deep) < 210
    assert max(map(len, deep)) < 120
