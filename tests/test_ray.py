"""`holdfast cluster` on a real Ray: members are placed, started again by their actors and by Ray, drained, removed."""

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from holdfast.cli import main
from tests.test_workers import is_running

ray = pytest.importorskip("ray")

SERVE = ["--", "--insecure", "--sessions", "2", "--recent", "64", "--max-pin", "16", "--snapshot-memory-mb", "16"]


@pytest.fixture(scope="module")
def journal() -> Iterator[str]:
    from tests.postgres import fresh_database

    with fresh_database() as url:
        yield url


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ray")  # of a short name: sockets are below it
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # without it Ray writes one to the home directory
    ray.init(
        num_cpus=4,
        namespace="tide",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    del os.environ["RAY_AUTH_TOKEN"]
    shutil.rmtree(folder, ignore_errors=True)


def _command(*words: str) -> int:
    return main(["cluster", words[0], "--namespace", "tide", *words[1:]])


def _up(journal: str, members: int, *more: str) -> int:
    return _command("up", "--members", str(members), *SERVE, "--journal", journal, *more)


def _told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert _command("status", "--json", "--insecure") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def _status(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = _told(capsys)["ray"]
    return found


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_members_run_on_ray_until_they_are_told_to_go(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _up(journal, 2) == 0
    table = capsys.readouterr().err
    _until(lambda: len(_told(capsys)["cluster"]["members"]) == 2)  # a member looks for others once in a while
    told = _told(capsys)
    assert [member["name"] for member in told["cluster"]["members"]] == list(told["ray"]) == ["tide-0", "tide-1"]
    first, second = told["ray"].values()
    assert first["http"] in table
    for member in (first, second):
        assert httpx.get(f"http://{member['http']}/readyz").status_code == 200
        assert (member["num_restarts"], member["error"]) == (0, "")

    os.kill(first["pid"], signal.SIGKILL)  # its actor starts it again
    ray.kill(ray.get_actor("tide-1"), no_restart=False)  # Ray starts it again, and its server ended with it
    _until(lambda: (now := _status(capsys)["tide-0"])["num_restarts"] == 1 and now["http"] != "")
    _until(lambda: bool((now := _status(capsys)["tide-1"]) and now["http"] and now["pid"] != second["pid"]))
    _until(lambda: not is_running(second["pid"]))

    pids = {name: member["pid"] for name, member in _status(capsys).items()}
    assert _command("drain", "tide-0") == 0
    assert not is_running(pids["tide-0"])
    assert _up(journal, 1) == 0  # what is missing comes back, what runs stays
    again = _status(capsys)
    assert list(again) == ["tide-0", "tide-1"]
    assert again["tide-1"]["pid"] == pids["tide-1"]

    assert _command("down") == 0
    assert _status(capsys) == {}
    assert not any(is_running(member["pid"]) for member in again.values())


@pytest.mark.slow
def test_members_that_cannot_start_are_removed_with_the_reason(
    journal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _up(journal, 1, "--model", "/no/such/model") == 1
    assert "tide-0 on " in (said := capsys.readouterr().err)
    assert "/no/such/model" in said
    assert _status(capsys) == {}


def test_what_cannot_work_is_refused_before_anything_starts(
    journal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        assert _command(*words) == 2
        return capsys.readouterr().err

    assert "--journal postgresql://" in refused("up", "--members", "1", "--", "--insecure")
    assert "--keys-file" in refused("up", "--members", "1", "--", "--journal", journal)
    assert "--http is decided by" in refused("up", "--members", "1", "--", "--journal", journal, "--http", "0.0.0.0:1")
    assert "Ray has no member tide-7; it has: none" in refused("drain", "tide-7")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray; to install it, run: " in refused("status")
