"""`holdfast serve` as a process: banner, a chat against it, drain, and what it refuses."""

import dataclasses
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from holdfast.cli import main
from holdfast.config import GROUPS, flag_of
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.logs import RepeatLimit

COMMAND = [sys.executable, "-m", "holdfast.cli"]
FREE = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
OPTIONS = [*FREE, "--recent", "64", "--max-pin", "16", "--sessions", "3"]


@dataclass
class Process:
    process: "subprocess.Popen[str]"
    banner: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process.stderr
        self.process.send_signal(number)
        status = self.process.wait(30)
        self.process.stderr.close()
        return status

    @property
    def grpc(self) -> str:
        found = re.search(r"gRPC\s+(\S+)", self.banner)
        assert found
        return found.group(1)

    @property
    def http(self) -> str:
        found = re.search(r"http://(\S+)/metrics", self.banner)
        assert found
        return found.group(1)


def start(*more: str, options: Sequence[str] = OPTIONS, env: dict[str, str] | None = None, shell: str = "") -> Process:
    """`shell`: commands that come before, in the same process."""
    process = subprocess.Popen(
        ["sh", "-c", f'{shell}\nexec "$@"', "sh", *COMMAND, "serve", *options, *more],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )
    assert process.stderr
    banner = ""
    while "Ctrl-C" not in banner:
        line = process.stderr.readline()
        assert line, f"the server ended with {process.wait()}: {banner}"
        banner += line
    return Process(process, banner)


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    running = start()
    yield running
    assert running.stop() == 0


def test_the_banner_says_where_the_doors_are_and_what_to_try(server: Process) -> None:
    assert "3 sessions of 4 + 64 tokens" in server.banner
    assert f"chat --server http://{server.http}" in server.banner
    assert httpx.get(f"http://{server.http}/readyz").status_code == 200
    console = server.banner.partition("console  ")[2].split()[0]
    assert httpx.get(console).headers["content-type"].startswith("text/html")


def test_the_command_of_the_banner_works(server: Process) -> None:
    command = server.banner.partition("try it")[2].splitlines()[0]
    lines = "What is the capital of France?\n/info\nTell me about the sea.\n/quit\n"
    done = subprocess.run(["bash", "-c", command], input=lines, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens of history" in done.stderr
    assert "have left the window" in done.stderr
    session = done.stderr.partition("continue with:")[2].split()[-1]  # the server still has it
    assert httpx.delete(f"http://{server.http}/sessions/{session}").status_code == 204


def test_chat_says_what_is_wrong_with_a_server(server: Process, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "hi", "--server", "127.0.0.1:1"]) == 1
    assert "is `holdfast serve` running there?" in capsys.readouterr().err
    assert main(["chat", "hi", "--server", server.grpc]) == 1
    assert "does not answer in HTTP; if this is the gRPC address, pass grpc://HOST:PORT" in capsys.readouterr().err
    assert main(["sessions", "list", "--server", f"http://{server.http}"]) == 1
    assert "uses the server's gRPC address" in capsys.readouterr().err


def test_chat_sends_tokens_to_those_who_ask(server: Process, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--server", f"grpc://{server.grpc}", "--max-tokens", "5", "--system", "x " * 9]
    assert main(["chat", "hi", *words]) == 0
    assert capsys.readouterr().out.strip()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        assert not stub.ListSessions(pb.ListSessionsRequest()).sessions  # the chat closed its session
    assert main(["chat", "hi", *words, "--session", "0"]) == 2
    assert "--session needs --server with the HTTP address" in capsys.readouterr().err


def test_a_client_killed_in_mid_stream_leaves_a_working_session(server: Process) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        opening = pb.CreateSessionRequest(token_ids=[1, 9690, 198], eos_token_ids=[3])  # which is not sampled
        session = stub.CreateSession(opening).session_id
        client = (
            "import sys, grpc\n"
            "from holdfast.serving.grpc.gen import runtime_pb2 as pb, runtime_pb2_grpc as rpc\n"
            "stub = rpc.RuntimeServiceStub(grpc.insecure_channel(sys.argv[1]))\n"
            "for e in stub.Generate(pb.GenerateRequest(session_id=sys.argv[2], max_tokens=100000)):\n"
            "    print(e.token.token_id, flush=True)\n"
        )
        doomed = subprocess.Popen(
            [sys.executable, "-c", client, server.grpc, session], stdout=subprocess.PIPE, text=True
        )
        assert doomed.stdout
        streamed = [int(doomed.stdout.readline()) for _ in range(4)]
        doomed.kill()
        doomed.wait()
        doomed.stdout.close()
        info = pb.GetSessionInfoRequest(session_id=session)
        while stub.GetSessionInfo(info).busy:
            pass
        history = [t for chunk in stub.GetHistory(pb.GetHistoryRequest(session_id=session)) for t in chunk.token_ids]
        assert history[3:7] == streamed
        again = list(stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=3)))
        assert sum(event.HasField("token") for event in again) == 3
        stub.CloseSession(pb.CloseSessionRequest(session_id=session))


def test_ctrl_c_drains_and_exits_0_and_aliases_warn() -> None:
    running = start("--capacity", "2", "--window", "32", "--block-size", "4", "--served-model-name", "kelp")
    assert "--block-size has no effect yet" in running.banner
    assert "kelp is served: 2 sessions of 4 + 32 tokens" in running.banner
    with grpc.insecure_channel(running.grpc) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        session = stub.CreateSession(pb.CreateSessionRequest(token_ids=[1, 2])).session_id
        call = stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=12))
        next(call)
        running.process.send_signal(signal.SIGINT)
        assert sum(event.HasField("token") for event in call) == 11  # what ran may end
    assert running.stop() == 0


def test_a_flood_of_idle_connections_neither_closes_the_door_nor_fills_the_log() -> None:
    running = start(shell="ulimit -Sn 100; ulimit -Hn 320")
    try:
        limits = Path(f"/proc/{running.process.pid}/limits")
        if limits.exists():
            assert re.search(r"Max open files +320 +320", limits.read_text())
        host, port = running.http.split(":")
        idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(400)]
        for _ in range(3):
            assert httpx.get(f"http://{running.http}/health", timeout=10).status_code == 200
        for connection in idle:
            connection.close()
        running.process.terminate()
        _, log = running.process.communicate(timeout=30)
        assert len(log) < 1000, log[:1000]
    finally:
        running.process.kill()
        running.process.wait()


def test_repeated_log_lines_are_counted_instead_of_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passed, limit = 0.0, list[str](), RepeatLimit(num_lines=2)
    monkeypatch.setattr("time.monotonic", lambda: clock)

    def log(line: int, text: str, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("x", level, "x.py", line, "%s", (text,), None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for number in range(5):
        log(1, f"a{number}")
        log(2, f"access {number}", logging.INFO)
    log(3, "b")
    assert passed == ["a0", "access 0", "a1", "access 1", "access 2", "access 3", "access 4", "b"]
    clock = 60.0
    log(1, "a5")
    log(3, "b")
    assert passed[-2:] == ["a5 (3 more like this were not logged)", "b"]


def _help(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", flag])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_the_help_shows_what_matters_and_help_all_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, full = _help("--help", capsys), _help("--help-all", capsys)
    assert short.startswith("usage: holdfast serve [MODEL] [OPTIONS]\n")
    shown, every = ({*re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)} for text in (short, full))
    assert {"--http", "--grpc", "--sessions", "--recent", "--data-dir", "--keys-file", "--help-all"} <= shown
    assert len(shown) <= 15
    flags = {flag_of(field.name) for cls in GROUPS for field in dataclasses.fields(cls)}
    assert flags <= every
    headings = re.findall(r"^([\w ]+):$", full, re.MULTILINE)
    assert headings[2:] == list(dict.fromkeys(headings[2:]))
    assert {"addresses and security", "storage", "limits", "chat", "engine", "upstream"} <= set(headings)
    assert "TEXT" not in full


def test_host_and_port_are_the_two_halves_of_http() -> None:
    running = start(
        "--model", "smollm2-135m-instruct", options=[*FREE[:2], *OPTIONS[4:], "--host", "localhost", "--port", "0"]
    )
    assert running.http.startswith("localhost:")
    assert httpx.get(f"http://{running.http}/readyz").status_code == 200
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--http", "127.0.0.1:0", "--port", "1"], "pass the address once"),
        (["--host", "0.0.0.0", "--port", "0"], "refusing to listen on 0.0.0.0:0 without API keys"),
        (["--port", "99999"], "'127.0.0.1:99999' is not HOST:PORT"),
        (["--host", "::1", "--port", "99999"], "'[::1]:99999' is not HOST:PORT"),
        ([*FREE, "--sessions", "100000"], "lower --sessions to"),
        ([*FREE, "--threads", "100000"], "threads must be"),
        (["--grpc", "0.0.0.0:0"], "refusing to listen on 0.0.0.0:0 without API keys"),
        (["--http", "0.0.0.0:0"], "refusing to listen on 0.0.0.0:0 without API keys"),
        (["--grpc", "here"], "'here' is not HOST:PORT"),
        (["--keys-file", "/no/keys"], "cannot read the keys file"),
        (["some/model", "--verifier-id", "other"], "pass the model once"),
        (["no-such-model"], "no model 'no-such-model'"),
        (["--backend", "vllm"], "--upstream and --backend sglang or vllm must be given together"),
        (["--upstream", "http://127.0.0.1:1"], "--upstream and --backend sglang or vllm must be given together"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOLDFAST_GRPC", "HOLDFAST_HTTP"):  # a server may run on the default ports
        monkeypatch.setenv(name, "127.0.0.1:0")
    assert main(["serve", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_sentence(server: Process) -> None:
    for option, address in (("--grpc", server.grpc), ("--http", server.http)):
        done = subprocess.run(
            [*COMMAND, "serve", *OPTIONS, option, address], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert f"cannot listen on {address}" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_example_runs(server: Process) -> None:
    example = Path(__file__).parents[1] / "examples" / "session.py"
    done = subprocess.run(
        [sys.executable, str(example), server.grpc], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    prefilled = [int(number) for number in re.findall(r"(\d+) tokens prefilled", done.stdout)]
    assert prefilled[1] < prefilled[0]


def test_sessions_are_listed_shown_and_closed(server: Process) -> None:
    address = server.banner.split("gRPC")[1].split()[0]
    with grpc.insecure_channel(address) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.CreateSessionRequest(client_label="mine", token_ids=[1, 2])
        session = stub.CreateSession(request).session_id

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        words = ("sessions", *words, "--server", address)
        return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=60)

    listed = command("list")
    assert session in listed.stdout
    assert "mine" in listed.stdout
    assert "tokens    2: 2 given in 1 spans" in command("show", session[:12]).stdout
    assert command("close", session).stdout == f"{session}: closed after 2 tokens\n"
    gone = command("show", session)
    assert gone.returncode == 1
    assert "it was closed" in gone.stderr
    assert session not in command("list").stdout
