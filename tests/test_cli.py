"""The command line as a person uses it: real processes, the real model."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.usage import check_environment
from holdfast.models import GGUFSource, open_model

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
    done = _run("chat", "What is the capital of France?", "--temperature", "0", "--dtype", dtype, *SMALL)
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr
    assert "window 45/2068" in done.stderr


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


def _heed_ctrl_c() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--max-tokens", "4000", "--temperature", "1.5", "--top-p", "1", "--seed", "3", *SMALL],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,  # noqa: PLW1509 - one call, no lock
    )
    os.close(inner)
    seen = ""

    def read_until(text: str, num: int = 0) -> None:
        nonlocal seen
        while text not in seen or len(seen) < num:
            seen += os.read(outer, 4096).decode(errors="replace")

    read_until("> ")
    os.write(outer, b"Write a long story about kelp.\n")
    seen = ""
    read_until("", num=80)  # the question, and some of the answer
    os.kill(process.pid, signal.SIGINT)
    read_until("stopped; the tokens sampled so far stay")
    read_until("> ")
    os.write(outer, b"/info\n")
    read_until("tokens of history")
    os.write(outer, b"/quit\n")
    assert process.wait(30) == 0
    os.close(outer)


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
