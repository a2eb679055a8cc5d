"""`holdfast sessions export | import | purge` against a running server, and purge without one."""

import http.server
import io
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import httpx
import pytest

from holdfast.cli import main
from holdfast.cli.serve import _banner
from holdfast.cli.usage import own_command
from holdfast.config import ServeConfig
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.lifecycle import ServerAddresses
from tests.serving import Server, default_chat, serving_aside, wordy_engine


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving_aside(wordy_engine(), default_chat(), data_dir=str(tmp_path / "data"), max_parked=9) as server:
        yield server


def sessions_of(server: Server, *counts: int) -> list[str]:
    """Open sessions of so many tokens."""
    with grpc.insecure_channel(server.address) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        requests = (pb.CreateSessionRequest(token_ids=range(count), client_label="mine") for count in counts)
        return [stub.CreateSession(request).session_id for request in requests]


def close(server: Server, *sessions: str) -> None:
    for session in sessions:
        assert httpx.delete(f"http://{server.http}/sessions/{session}", verify=False).status_code == 204


def test_sessions_are_listed_by_label_and_state(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    mine = sessions_of(server, 1, 2)
    other = httpx.post(f"http://{server.http}/sessions", json={"label": "other"}, verify=False).json()["session_id"]

    def listed(*words: str) -> set[str]:
        assert main(["sessions", "list", "--server", server.address, *words]) == 0
        shown = capsys.readouterr().out
        return {session for session in (*mine, other) if session in shown}

    assert listed() == {*mine, other}
    assert listed("--label", "mine") == set(mine)
    assert listed("--label", "other", "--state", "live") == {other}
    assert listed("--state", "failed") == set()
    with pytest.raises(SystemExit):
        main(["sessions", "list", "--server", server.address, "--state", "asleep"])


def test_of_several_addresses_the_first_that_answers_is_used(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = sessions_of(server, 1)
    assert main(["sessions", "list", "--server", f"127.0.0.1:1, {server.address}"]) == 0
    assert mine[0] in capsys.readouterr().out
    chat = ["chat", "hi", "--max-tokens", "2"]
    assert main([*chat, "--server", f"127.0.0.1:1,http://{server.http}"]) == 0
    assert capsys.readouterr().out.strip()
    assert main([*chat, "--server", "127.0.0.1:1,127.0.0.1:2"]) == 1
    assert "no answer from 127.0.0.1:1,127.0.0.1:2" in capsys.readouterr().err
    assert main(["sessions", "list", "--server", "grpcs://127.0.0.1:1,grpc://127.0.0.1:2"]) == 2
    assert "either all addresses use TLS, or none of them" in capsys.readouterr().err
    monkeypatch.setenv("HOLDFAST_API_KEY", "k")
    for words in (["sessions", "list"], chat):  # the key may go to the first, and not to the second
        assert main([*words, "--server", "127.0.0.1:1,10.0.0.1:2"]) == 2
        assert "in plain text to 10.0.0.1:2" in capsys.readouterr().err


def test_a_request_that_a_server_turned_away_goes_to_the_next(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    class Draining(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps({"error": {"code": "draining", "accepted": "false", "message": "gone"}}).encode()
            self.send_response(503)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Draining) as gone:
        threading.Thread(target=gone.serve_forever).start()
        address = f"127.0.0.1:{gone.server_address[1]}"
        assert main(["chat", "hi", "--max-tokens", "2", "--server", f"{address},{server.http}"]) == 0
        assert main(["chat", "hi", "--server", address]) == 1
        gone.shutdown()
    assert "gone" in capsys.readouterr().err


def test_a_session_goes_to_a_file_and_comes_back(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (session,) = sessions_of(server, 300)
    door = ["--server", server.address]
    assert main(["sessions", "export", session, *door]) == 0
    path = tmp_path / f"{session}.holdfast"
    assert capsys.readouterr().out == f"{session}.holdfast: {path.stat().st_size:,} bytes\n"
    assert main(["sessions", "import", str(path), *door]) == 0
    new, _, counts = capsys.readouterr().out.partition(": ")
    assert new != session
    assert counts == "300 tokens, 300 reused, 0 computed again\n"
    small = tmp_path / "small"
    assert main(["sessions", "export", session, "-o", str(small), "--no-snapshot", *door]) == 0
    assert small.stat().st_size < path.stat().st_size
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(small.read_bytes())))
    capsys.readouterr()
    assert main(["sessions", "import", "-", *door]) == 0
    assert "300 tokens, 0 reused, 300 computed again" in capsys.readouterr().out
    close(server, session)
    assert main(["sessions", "export", session, "-o", str(tmp_path / "closed"), *door]) == 0
    assert sorted(found.name for found in tmp_path.iterdir()) == sorted([path.name, "closed", "data", "small"])


@pytest.mark.parametrize(
    "case",
    [
        (["export", "nobody"], 1, "no session nobody"),
        (["export", "{session}", "-o", "{there}"], 2, "already exists; pass another -o FILE, or --force"),
        (["export", "{session}", "-o", "/no/such/place"], 2, "cannot write /no/such/place"),
        (["import", "/no/such/file"], 2, "cannot read /no/such/file: No such file"),
        (["import", "{there}"], 1, "this is not a session file"),
        (["import", "{there}", "--server", "127.0.0.1:1"], 1, "no answer from 127.0.0.1:1"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_leaves_no_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[list[str], int, str]
) -> None:
    words, status, said = case
    there = tmp_path / "there"
    there.write_text("not a session, whatever it is called")
    (session,) = sessions_of(server, 3)
    words = [word.format(session=session, there=there) for word in words]
    door = [] if "--server" in words else ["--server", server.address]
    assert main(["sessions", words[0], *door, *words[1:]]) == status
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert {found.name for found in tmp_path.iterdir()} == {"there", "data"}
    assert not list(Path.cwd().glob("*.holdfast"))


def test_closed_sessions_are_purged_once_someone_is_sure(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, still_open = sessions_of(server, 1, 2, 3)
    close(server, one, two)
    many = sessions_of(server, *[0] * 10)
    close(server, *many)

    def purge(*words: str) -> tuple[int, str]:
        status = main(["sessions", "purge", "--http", server.http, *words])
        said = capsys.readouterr()
        return status, said.out + said.err

    def answering(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text))

    assert purge() == (0, "nothing to purge\n")  # none is past the retention
    assert purge("--older-than", "1h") == (0, "nothing to purge\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    status, said = purge("--closed")
    assert (status, one in said, "pass --yes to confirm" in said, "and 2 more" in said) == (2, True, True, True)
    answering("n\n")
    assert purge("--closed")[0] == 1
    answering("y\n")
    status, said = purge(one)
    assert (status, said.endswith("purged 1 session\n")) == (0, True)
    status, said = purge(still_open, "--yes")
    assert (status, "is not closed; close it first" in said) == (1, True)
    status, said = purge(one, "--yes")
    assert (status, f"no session {one}" in said) == (1, True)
    assert purge("--older-than", "0s", "--yes") == (0, "purged 11 sessions\n")
    assert purge("--closed", one)[0] == 2
    with pytest.raises(SystemExit):
        purge("--older-than", "soon")


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [("127.0.0.1:1", 1, "no answer from 127.0.0.1:1"), ("ftp://there", 2, "ftp://there is not HOST:PORT")],
)
def test_a_server_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str], address: str, status: int, said: str
) -> None:
    assert main(["sessions", "purge", "--closed", "--http", address]) == status
    assert said in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_data_directory_that_no_server_uses_can_be_purged_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"

    def purge(*words: str) -> tuple[int, str]:
        status = main(["sessions", "purge", "--data-dir", str(data), *words])
        said = capsys.readouterr()
        return status, said.out + said.err

    status, said = purge("--closed")
    assert (status, "has no journal" in said, data.exists()) == (2, True, False)
    with serving_aside(wordy_engine(), default_chat(), data_dir=str(data)) as server:
        one, two, still_open = sessions_of(server, 1, 2, 3)
        close(server, one, two)
        status, said = purge("--closed", "--yes")
        assert (status, "in use by another Holdfast" in said) == (2, True)
    assert purge()[0] == 2
    assert purge(one, "--yes") == (0, "purged 1 session\n")
    assert purge("--older-than", "1d", "--yes") == (0, "nothing to purge\n")
    assert purge("--closed", "--yes") == (0, "purged 1 session\n")
    with serving_aside(wordy_engine(), default_chat(), data_dir=str(data)) as server:
        listed: list[Any] = httpx.get(f"http://{server.http}/sessions", verify=False).json()["data"]
        assert [entry["session_id"] for entry in listed] == [still_open]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    chain, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    return chain, key


def test_commands_reach_a_server_with_tls_and_keys(
    certificate: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = certificate
    keys = tmp_path / "keys"
    keys.write_text("ann:sesame\n")
    monkeypatch.setenv("HOLDFAST_API_KEY", "sesame")
    files = {"tls_cert": str(chain), "tls_key": str(key), "keys_file": str(keys)}

    def run(*words: str) -> tuple[int, str]:
        status = main([*words])
        said = capsys.readouterr()
        return status, said.out + said.err

    with serving_aside(wordy_engine(), default_chat(), **files) as server:
        trusting = ("--server", server.address, "--tls-ca", str(chain))
        assert run("sessions", "list", *trusting)[0] == 0
        status, said = run("chat", "hi", "--server", f"grpc://{server.address}", "--tls-ca", str(chain))
        assert (status, "serves test, whose tokenizer differs" in said) == (2, True)  # its model is a fake
        assert run("sessions", "list", "--server", f"https://{server.address}", "--tls-ca", str(chain))[0] == 0
        purge = ("sessions", "purge", "--closed", "--yes", "--http", server.http)
        assert run(*purge, "--tls-ca", str(chain)) == (0, "nothing to purge\n")
        chat = ("chat", "hi", "--server", server.http)
        for words in (("sessions", "list", "--tls", "--server", server.address), (*purge, "--tls"), (*chat, "--tls")):
            status, said = run(*words)
            assert (status, "with a certificate that is trusted here?" in said) == (1, True)
        status, said = run(*chat)
        assert (status, "If it has a certificate, pass https://HOST:PORT." in said) == (1, True)
        for words in (("sessions", "list", "--server", server.address), purge, chat):
            assert run(*words, "--tls-ca", "/no/such.pem") == (
                2,
                "holdfast: cannot read the certificates in /no/such.pem: No such file or directory\n",
            )
        monkeypatch.setenv("HOLDFAST_API_KEY", "open up")
        assert run("sessions", "list", *trusting) == (
            1,
            f"holdfast: {server.address}: the API key is not valid for this server\n",
        )


@pytest.mark.parametrize(
    "words",
    [
        ["sessions", "list", "--server", "0.0.0.0:1"],
        ["chat", "hi", "--server", "0.0.0.0:1"],
        ["chat", "hi", "--server", "http://0.0.0.0:1", "--tls"],
        ["chat", "hi", "--server", "grpc://0.0.0.0:1"],
        ["sessions", "purge", "--closed", "--yes", "--http", "0.0.0.0:1"],
        ["sessions", "purge", "--closed", "--yes", "--http", "http://0.0.0.0:1", "--tls"],
    ],
)
def test_a_key_goes_to_another_machine_with_tls_only(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", "sesame")
    assert main(words) == 2
    assert "refusing to send HOLDFAST_API_KEY in plain text" in capsys.readouterr().err
    assert main([*words, "--insecure"]) == 1
    assert "no answer from" in capsys.readouterr().err


def test_an_address_that_is_none_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("ftp://127.0.0.1:50051", "here"):
        assert main(["sessions", "list", "--server", address]) == 2
        said = capsys.readouterr().err
        assert ("host:port" in said, said.count("\n")) == (True, 1)


def test_without_the_sdk_commands_say_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "holdfast_sdk", None)
    for words in (["sessions", "list"], ["chat", "hi", "--server", "grpc://127.0.0.1:1"]):
        assert main(words) == 2
        assert "sdks/python" in capsys.readouterr().err.partition("pip install ")[2]
    assert main(["chat", "hi", "--server", "127.0.0.1:1"]) == 1  # text needs no SDK
    assert "no answer from 127.0.0.1:1" in capsys.readouterr().err


def test_the_banner_is_a_command_that_works(
    certificate: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = certificate
    keys = tmp_path / "keys"
    keys.write_text("ann:sesame\n")
    monkeypatch.setenv("HOLDFAST_API_KEY", "sesame")
    files = {"tls_cert": str(chain), "tls_key": str(key), "keys_file": str(keys)}
    with serving_aside(wordy_engine(), default_chat(), **files) as server:
        addresses = ServerAddresses(server.address, server.http.replace("127.0.0.1", "0.0.0.0"))  # all interfaces
        banner = _banner(addresses, ServeConfig(**files), "test", has_chat=True)
        assert any("HOLDFAST_API_KEY" in line for line in banner)
        command = banner[-1].partition(own_command())[2]
        assert f" https://{server.http} " in command
        assert main([*shlex.split(command), "hi", "--max-tokens", "2"]) == 0
        assert capsys.readouterr().out.strip()


def test_a_server_without_http_is_tried_over_grpc() -> None:
    config = ServeConfig(http="", tls_cert="c.pem")
    line = _banner(ServerAddresses("127.0.0.1:50051", None), config, "my model.gguf", has_chat=False)[-1]
    assert line.endswith("chat --server grpcs://127.0.0.1:50051 --model 'my model.gguf' --tls-ca c.pem")


class Redirect(http.server.BaseHTTPRequestHandler):
    """Sends everyone from "/sessions/purge" to "/elsewhere", and notes which keys arrive there."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        is_first = self.path == "/sessions/purge"
        if not is_first:
            self.keys.append(self.headers["authorization"])
        self.send_response(302 if is_first else 200)
        self.send_header("location", f"http://localhost:{self.server.server_address[1]}/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_key_does_not_follow_a_redirect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", "sesame")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.server_address[1]
            assert main(["sessions", "purge", "--closed", "--yes", "--http", f"127.0.0.1:{port}"]) == 1
        finally:
            server.shutdown()
            thread.join()
    assert "status 302" in capsys.readouterr().err
    assert not Redirect.keys


def test_a_session_is_shown_as_text_or_as_json(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = sessions_of(server, 1200, 3)
    assert main(["sessions", "show", one, two, "--server", server.address]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith(f"session   {one}\nlabel     mine\nstate     live, idle for 0 s\n")
    assert "tokens    1,200: 1,200 given in 1 spans, 0 sampled in 0 spans\n" in first
    assert "window    the first 4 and the last 256 tokens; 940 are out of view\n" in first
    assert second.startswith(f"session   {two}\n")
    assert main(["sessions", "show", one, two, "--json", "--server", server.address]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(facts["session_id"], facts["history_length"], facts["state"]) for facts in shown] == [
        (one, 1200, "LIVE"),
        (two, 3, "LIVE"),
    ]


def test_a_session_is_searched_and_what_it_says_moves_no_cursor(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = default_chat().model.tokenizer.encode("The keeper is Ambrose.\nHe has a \x1b[31mred\x1b[0m lamp.")
    with grpc.insecure_channel(server.address) as channel:
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        session = stub.CreateSession(pb.CreateSessionRequest(token_ids=tokens)).session_id
    words = ["sessions", "search", session[:12], "keeper", "--server", server.address]
    assert main(words) == 0
    assert capsys.readouterr().out == ""
    assert main([*words, "--in-view"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"turn 1, given, tokens 0 to {len(tokens)}\n  The keeper is Ambrose.\n  He has a \ufffd[31mred"
    )
    assert main([*words, "--in-view", "--json", "--limit", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("The keeper is Ambrose.")


def test_the_start_of_a_session_id_is_enough_unless_several_begin_with_it(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = iter([f"{start}{'0' * 28}" for start in ("abc1", "abc2", "def1", "abd1")])
    monkeypatch.setattr("holdfast.sessions.session.secrets", SimpleNamespace(token_hex=lambda _: next(ids)))
    one, two, three, four = sessions_of(server, 1, 2, 3, 4)

    def run(*words: str, door: str = "--server") -> tuple[int, str]:
        status = main(["sessions", *words, door, server.address if door == "--server" else server.http])
        said = capsys.readouterr()
        return status, said.out + said.err

    assert run("show", "abc1")[1].startswith(f"session   {one}")
    for words in (["show", "ab"], ["close", "def", "abc"], ["export", "a"]):
        status, said = run(*words)
        assert (status, one in said, two in said, three in said) == (2, True, True, False)
    status, said = run("show", "abe")
    assert (status, "no session abe" in said) == (1, True)
    assert run("export", "d")[1].startswith(f"{three}.holdfast: ")
    assert run("close", "abc1", "abc2", "d")[1].count(": closed after") == 3
    status, said = run("purge", "abc", "--yes", door="--http")
    assert (status, one in said, four in said) == (2, True, False)
    assert run("purge", "abc1", "--yes", door="--http") == (0, "purged 1 session\n")
    assert run("purge", "abd", "--yes", door="--http")[0] == 1  # open
    assert run("purge", "abc", "--yes", door="--http") == (0, "purged 1 session\n")
