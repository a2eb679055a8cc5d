"""The command line as a person uses it: real processes, the real model."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from holdfast import cli
from holdfast.cli import main
from holdfast.cli.usage import check_environment
from holdfast.models import GGUFSource, open_model
from tests.serving import Server, default_chat, serving_aside, wordy_engine

COMMAND = [sys.executable, "-m", "holdfast.cli"]
SMALL = ["--max-pin", "40", "--rewind-tokens", "16"]


def _run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | (env or {}),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_capital_of_france_is_paris(dtype: str) -> None:
    done = _run("chat", "What is the capital of France?", "--dtype", dtype, *SMALL)  # greedy by default
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr
    assert "window 43/2066" in done.stderr


def test_a_conversation_remembers_and_tells_what_left_the_window() -> None:
    lines = [
        "My name is Bob.",
        "/info",
        "/help",
        "Tell me about the sea.",
        "",
        "/info",
        "/reset",
        "/info",
        "/quit",
        "never",
    ]
    options = ["--recent", "64", "--max-tokens", "40", "--temperature", "0", "--system", "You are terse.", *SMALL]
    done = _run("chat", *options, stdin="\n".join(lines))
    said = " ".join(done.stderr.split())
    assert done.returncode == 0
    assert "0 out of view" in said
    assert "have left the window" in said
    assert "/reset starts a new session" in said
    assert "no session yet" in said
    assert len(done.stdout.strip()) > 20


class Terminal:
    """A command on a terminal of its own, as a person has it in front of them."""

    def __init__(self, *command: str) -> None:
        self._outer, inner = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(inner),  # noqa: PLW1509 - one call, no lock
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(inner)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._outer)

    def until(self, text: str) -> str:
        """What is shown up to and including `text`, since the last call."""
        assert self._shows(text, 60), f"{text!r} is not in {self.seen!r}"
        before, found, self.seen = self.seen.partition(text)
        return before + found

    def interrupt(self, answer: str) -> None:
        """Ctrl-C at the prompt, until `answer` is shown: one that comes just before Python waits for a key is noticed
        only with the next key."""
        for _ in range(30):
            self.type(CTRL_C)
            if self._shows(answer, 2):
                break
        self.until(answer)

    def _shows(self, text: str, timeout_s: float) -> bool:
        while text not in self.seen:
            if not select.select([self._outer], [], [], timeout_s)[0]:
                return False
            self.seen += os.read(self._outer, 4096).decode(errors="replace")
        return True

    def type(self, text: str) -> None:
        os.write(self._outer, text.encode())

    def ended(self) -> int:
        """The exit code. Reads what is still shown: a terminal that nobody reads blocks."""
        with contextlib.suppress(OSError):  # nobody has the other end open any more
            while data := os.read(self._outer, 4096):
                self.seen += data.decode(errors="replace")
        return self._process.wait(30)


def _take_terminal(inner: int) -> None:
    """Make this the terminal of the new session, so that Ctrl-C reaches it; a shell may have made us deaf to that."""
    fcntl.ioctl(inner, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
PASTED = "\x1b[200~{}\x1b[201~"  # what a terminal sends for a pasted text


@pytest.fixture(scope="module")
def talker() -> Iterator[Server]:
    """A server whose model talks nonsense and never ends by itself."""
    with serving_aside(wordy_engine(num_slabs=8), default_chat()) as server:
        yield server


def _get(server: Server, path: str) -> Any:
    return httpx.get(f"http://{server.http}{path}", verify=False, timeout=20).json()


def _messages(server: Server, session: str) -> list[tuple[str, str]]:
    messages = _get(server, f"/sessions/{session}")["messages"]
    return [(message["role"], message["content"]) for message in messages]


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    options = ("--max-tokens", "4000", "--temperature", "1.5", "--top-p", "1", "--seed", "3", *SMALL)
    with Terminal(*COMMAND, "chat", *options) as terminal:
        terminal.until("> ")
        terminal.type("Write a long story about kelp." + ENTER)
        assert re.search(r"computing \d+ tokens", terminal.until("tokens"))
        terminal.until(" the")
        terminal.type(CTRL_C)
        terminal.until("stopped; what was said so far stays in the conversation")
        terminal.until("> ")
        terminal.type("/info" + ENTER)
        terminal.until("tokens of history")
        terminal.type("/exit" + ENTER)
        assert terminal.ended() == 0


def test_a_conversation_on_a_server_outlives_ctrl_c_and_can_be_continued(talker: Server) -> None:
    chat = (*COMMAND, "chat", "--server", f"http://{talker.http}", "--max-tokens", "150", "--temperature", "0")
    with Terminal(*chat) as terminal:
        terminal.until("> ")
        terminal.type("half a quest")
        terminal.until("half a quest")
        terminal.interrupt("Ctrl-D or /exit leaves")
        terminal.until("> ")
        terminal.type("Tell me all." + ENTER)
        terminal.until("waiting for the first token")
        terminal.until("\x1b[?25h")  # the cursor is back: the reply has begun
        for _ in range(8):
            terminal.until(" ")
        terminal.type(CTRL_C)
        terminal.until("stopped; what was said so far stays in the conversation")
        terminal.until("> ")
        terminal.type("Go on." + ENTER)
        terminal.until("finish reason length")
        terminal.until("> ")
        terminal.type(CTRL_D)
        left = terminal.until("--session ") + terminal.until("\n")
        assert terminal.ended() == 0
    found = re.search(rf"chat --server http://{talker.http} --session (\w+)", left)
    assert found
    session = found[1]
    said = _messages(talker, session)
    assert [role for role, _ in said] == ["user", "assistant", "user", "assistant"]
    assert (said[0][1], said[2][1]) == ("Tell me all.", "Go on.")
    assert 0 < len(said[1][1]) < len(said[3][1])  # the reply that was stopped is shorter
    again = _run("chat", "And then?", "--server", talker.http, "--session", session[:8], "--max-tokens", "4")
    assert again.returncode == 0, again.stderr
    assert _messages(talker, session)[4] == ("user", "And then?")  # alone: an empty pipe adds nothing


@pytest.mark.parametrize("has_readline", [True, False])
def test_a_pasted_text_of_several_lines_is_one_turn(talker: Server, has_readline: bool) -> None:
    session = _new_session(talker)
    options = ["chat", "--server", talker.http, "--session", session, "--max-tokens", "4"]
    command = [*COMMAND, *options]
    if not has_readline:
        without = (
            "import sys; sys.modules['readline'] = None; import holdfast.cli as cli; sys.exit(cli.main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", without, *options]
    with Terminal(*command) as terminal:
        terminal.until("> ")
        text = "Sum these up:\none\n\n/two"
        terminal.type(PASTED.format(text) + ENTER if has_readline else text + "\n")
        terminal.until("finish reason length")
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
    assert [said for role, said in _messages(talker, session) if role == "user"] == [text]


def _new_session(server: Server) -> str:
    session: str = httpx.post(f"http://{server.http}/sessions", verify=False).json()["session_id"]
    return session


def test_piped_text_goes_below_the_question(talker: Server, capsys: pytest.CaptureFixture[str]) -> None:
    session = _new_session(talker)
    options = ("--server", talker.http, "--session", session, "--max-tokens", "2")
    done = _run("chat", "Summarise", *options, stdin="a file\nof two lines\n")
    assert done.returncode == 0, done.stderr
    assert _messages(talker, session)[0] == ("user", "Summarise\n\na file\nof two lines")
    command = [*COMMAND, "chat", "Summarise", *options]
    unreadable = subprocess.run(command, input=b"\xff\xfe", capture_output=True, check=False, timeout=60)
    assert unreadable.returncode == 2
    assert b"standard input is not UTF-8" in unreadable.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "hi", "--model", "smollm2"], "did you mean smollm2-135m-instruct"),
        (["chat", "hi", "--max-tokens", "0"], "max_tokens must be 1 or more"),
        (["chat", "hi", "--temperature", "nan"], "temperature must be 0 or more"),
        (["chat", "hi", "--recent", "2"], "window is smaller than its sink"),
        (["chat", "hi", "--sink", "600"], "sink 600 is more than max_pin 512"),
        (["chat", "hi", "--recent", "100000"], "context of 8192"),
        (["chat", "hi", "--recent", "0"], "window is smaller"),
        (["chat", "hi", "--rewind-tokens", "10000000000"], "not even one slab fits"),
        (["chat", "hi", "--device", "cuda"], "no CUDA device"),
        (["chat", "hi", "--config", "/no/such.toml"], "cannot read the config file"),
        (["models", "info", "/no/such/model.gguf"], "no model"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("holdfast: ") or "holdfast: " in error
    assert "Traceback" not in error


def test_a_gguf_cut_in_half_is_refused_by_every_command(
    default_source: GGUFSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(default_source.path.read_bytes()[:49_000_000])
    for arguments in (["models", "info", str(path)], ["chat", "hi", "--model", str(path)]):
        assert main(arguments) == 2
        assert "truncated" in capsys.readouterr().err


def test_environment_variables_are_read() -> None:
    done = _run("chat", "hi", *SMALL, env={"HOLDFAST_RECENT": "lots"})
    assert done.returncode == 2
    assert "HOLDFAST_RECENT must be a whole number" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("HOLDFAST_RECNT", "64", "did you mean HOLDFAST_RECENT?"),
        ("HOLDFAST_APIKEY", "x", "did you mean HOLDFAST_API_KEY?"),
        ("HOLDFAST_PORT", "9000", "set HOLDFAST_HTTP=HOST:PORT"),
        ("HOLDFAST_XYZZY", "1", "there is no environment variable HOLDFAST_XYZZY: unset it"),
    ],
)
def test_a_variable_that_is_not_ours_is_refused_with_the_nearest_name(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    for command in (["models", "list"], ["sessions", "list"], ["serve", "no-such-model"]):
        assert main(command) == 2
        assert says in capsys.readouterr().err


def test_variables_that_kubernetes_sets_for_a_service_are_none_of_ours() -> None:
    check_environment(
        {
            "HOLDFAST_PORT": "tcp://10.0.0.7:8000",
            "HOLDFAST_GRPC_PORT": "tcp://10.0.0.7:50051",
            "HOLDFAST_SERVICE_HOST": "10.0.0.7",
            "HOLDFAST_HTTP_SERVICE_PORT_WEB": "8000",
            "HOLDFAST_PORT_8000_TCP_ADDR": "10.0.0.7",
        }
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--sesions", "3"], "there is no flag --sesions; did you mean --sessions?"),
        (["serve", "--api-key", "x"], "pass --keys-file FILE"),
        (["serve", "--api-key=x"], "there is no flag --api-key: "),
        (["serve", "--max-model-len", "9"], "--recent TOKENS"),
        (["serve", "-c", "4096"], "--recent TOKENS"),
        (["serve", "--tensor-parallel-size", "2"], "--upstream URL"),
        (["serve", "one", "two"], "unexpected argument 'two'"),
        (["chat", "--temprature", "1"], "did you mean --temperature?"),
        (["sessions", "list", "--sever", "x:1"], "did you mean --server?"),
        (["bench", "overhead", "--quik"], "did you mean --quick?"),
        (["models", "info", "--frobnicate"], "there is no flag --frobnicate"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_right_one_below_a_short_usage(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert says in error
    assert len(error.splitlines()) <= 4


def test_an_unusable_command_line_shows_usage() -> None:
    for arguments in ([], ["dance"], ["chat", "--device", "abacus"]):
        done = _run(*arguments)
        assert done.returncode == 2
        assert "usage: holdfast" in done.stderr


def test_models_can_be_listed_pulled_verified_and_inspected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    for arguments in ([], ["list"]):
        assert main(["models", *arguments]) == 0
        assert f"on this machine: {open_model().path}\n" in capsys.readouterr().out  # never cut
    assert main(["models", "verify"]) == 0
    assert f"{open_model().path}: ok, SHA-256 " in capsys.readouterr().out
    assert main(["models", "pull"]) == 0
    assert capsys.readouterr().out.strip().endswith(".gguf")
    assert main(["models", "info"]) == 0
    assert "134 M in 30 layers" in capsys.readouterr().out


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    pipeline = f"{sys.executable} -m holdfast.cli models info | head -c 1"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


# What a command imports

_LOADED = """
import contextlib, sys
from holdfast.cli import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--version"], ["--help"], [], ["no-such-command"]], ids=str)
def test_what_needs_no_command_imports_nothing_but_our_settings(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-I", "-c", _LOADED, *words], capture_output=True, text=True, check=True)
    loaded = done.stderr.splitlines()[-1].split()
    assert "holdfast" in loaded
    assert not {"numpy", "rich", "msgspec", "grpc", "aiohttp", "starlette", "uvicorn", "jinja2", "torch"} & set(loaded)


def test_serving_our_own_engine_imports_neither_torch_nor_a_client_for_upstreams() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _LOADED, "serve", "--help"], capture_output=True, text=True, check=True
    )
    assert not {"torch", "aiohttp", "openai"} & set(done.stderr.splitlines()[-1].split())


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    folder = Path(cli.__file__).parent
    files = [file.stem for file in folder.glob("*.py") if "\ndef register(" in file.read_text()]
    assert len(files) == 10
    for name in files:
        assert re.search(rf"^    {name} +\w", shown, re.MULTILINE), name


def test_a_flag_before_a_command_is_judged_by_that_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--jsn", "doctor"])
    assert "did you mean --json?" in capsys.readouterr().err
