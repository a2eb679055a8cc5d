"""`holdfast serve --workers`: who starts what when. Small stand-ins first, which tell and end as servers do; then
real servers on a real PostgreSQL."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from holdfast.cli.supervision import ChildReport, ServerChild, Supervisor
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from tests.test_serve import Process, start

STAND_IN = """
import os, signal, socket, sys, time
name, log, flaw = sys.argv[1:4]
link = socket.socket(fileno=int(sys.argv[4].partition("=")[2]))
def note(what):
    with open(log, "a") as file:
        file.write(f"{what} {name}\\n")
def end(*_):
    note("end")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
note("start")
if flaw and os.path.exists(flaw):
    sys.exit(int(open(flaw).read()))
note("serve")
link.sendall(b'{"banner":"served"}\\n')
if not link.recv(1):
    end()
"""


class Workers:
    """Stand-ins under a supervisor in a thread."""

    def __init__(self, folder: Path, num: int) -> None:
        self.log, self.flaw, self.banners = folder / "log", folder / "flaw", list[str]()
        self.log.touch()
        words = [sys.executable, "-c", STAND_IN]
        children = [ServerChild(f"w{i}", [*words, f"w{i}", str(self.log), str(self.flaw)]) for i in range(num)]
        self.supervisor = Supervisor(children, drain_s=5, on_ready=lambda report: self.banners.append(report.banner))
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.status = self.supervisor.run()

    def start(self) -> None:
        self._thread.start()

    def events(self) -> list[str]:
        return self.log.read_text().splitlines()

    @staticmethod
    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def until_served(self) -> None:
        self.until(lambda: all(child.report for child in self.supervisor.children))

    def join(self) -> int:
        self._thread.join(30)
        assert self.status is not None
        return self.status

    def stop(self) -> int:
        self.supervisor.stop()
        return self.join()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    found = Workers(tmp_path, 3)
    yield found
    found.supervisor.stop()
    found._thread.join(30)


def test_the_first_worker_starts_alone_and_the_banner_comes_once_when_all_serve(workers: Workers) -> None:
    workers.start()
    workers.until_served()
    assert workers.events()[:2] == ["start w0", "serve w0"]
    assert sorted(workers.events()) == sorted(f"{what} w{i}" for i in range(3) for what in ("start", "serve"))
    assert workers.stop() == 0
    assert workers.banners == ["served"]
    assert sorted(workers.events()[6:]) == ["end w0", "end w1", "end w2"]  # none was killed


def test_a_worker_that_dies_is_started_again_and_the_others_go_on(workers: Workers) -> None:
    workers.start()
    workers.until_served()
    pids = [child.process.pid for child in workers.supervisor.children if child.process]
    os.kill(pids[1], signal.SIGKILL)
    workers.until(lambda: workers.events().count("serve w1") == 2)
    workers.until_served()
    again = [child.process.pid for child in workers.supervisor.children if child.process]
    assert (again[0], again[2]) == (pids[0], pids[2])
    assert again[1] != pids[1]
    assert workers.stop() == 0
    assert workers.banners == ["served"]


def test_wrong_settings_are_found_by_the_first_worker_alone(workers: Workers) -> None:
    workers.flaw.write_text("2")
    workers.start()
    assert workers.join() == 2
    assert workers.events() == ["start w0"]
    assert workers.banners == []


def test_workers_that_cannot_be_started_again_are_given_up(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.supervision._FIRST_DELAY_S", 0.001)
    monkeypatch.setattr("holdfast.cli.supervision._LONGEST_DELAY_S", 0.01)
    workers.start()
    workers.until_served()
    workers.flaw.write_text("1")
    first, *others = workers.supervisor.children
    assert first.process
    os.kill(first.process.pid, signal.SIGKILL)
    workers.until(lambda: workers.events().count("start w0") > 6)  # for one alone it is tried on and on
    assert workers.status is None
    for child in others:
        assert child.process
        os.kill(child.process.pid, signal.SIGKILL)
    assert workers.join() == 1


def test_a_restart_takes_one_worker_after_the_other(workers: Workers) -> None:
    workers.start()
    workers.until_served()
    workers.supervisor.restart()
    workers.until(lambda: workers.events().count("serve w2") == 2)
    assert workers.events()[6:] == [f"{what} w{i}" for i in range(3) for what in ("end", "start", "serve")]


def test_delays_double_up_to_a_limit_and_a_worker_that_served_for_long_is_started_at_once() -> None:
    child = ServerChild("w", [])
    delays = []
    for _ in range(7):
        child._waits()
        delays.append(round(child.starts_at - time.monotonic(), 1))
    assert delays == [0.5, 1, 2, 4, 8, 8, 8]
    child.report, child.serves_since = ChildReport(), time.monotonic() - 11
    child._waits()
    assert child.starts_at <= time.monotonic()


def test_workers_end_with_a_parent_that_is_killed() -> None:
    child = (
        "import os, signal, sys\nfrom holdfast.cli.supervision import ChildReport, ParentLink\n"
        "ParentLink(int(sys.argv[1].partition('=')[2])).tell(ChildReport(banner=str(os.getpid())))\nsignal.pause()"
    )
    program = (
        "import sys\nfrom holdfast.cli.supervision import ServerChild, Supervisor\n"
        "children = [ServerChild('w0', [sys.executable, '-c', sys.argv[1]])]\n"
        "Supervisor(children, drain_s=5, on_ready=lambda report: print(report.banner, flush=True)).run()"
    )
    with subprocess.Popen([sys.executable, "-c", program, child], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.kill()
    Workers.until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _members(address: str) -> dict[str, int]:
    """The members that serve, with the number of times that servers have joined before them."""
    found = httpx.get(f"http://{address}/cluster", timeout=30).json()["members"]
    return {member["name"]: member["epoch"] for member in found if member["state"] == "serving"}


class Talk:
    """A chat session whose requests are sent again, once a failure has told that they may be."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.session = httpx.post(f"http://{address}/sessions", timeout=30).json()["session_id"]
        self._messages: list[dict[str, str]] = []
        self.num_failures = 0

    def ask(self, question: str) -> str:
        """The member that answered."""
        self._messages.append({"role": "user", "content": question})
        body = {"messages": self._messages, "temperature": 0, "max_tokens": 4}
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError):
                url = f"http://{self._address}/sessions/{self.session}/v1/chat/completions"
                reply = httpx.post(url, json=body, timeout=30)
                if reply.status_code == 200:
                    self._messages.append(reply.json()["choices"][0]["message"])
                    return reply.headers["holdfast-member"]
                assert reply.status_code == 503, reply.text
            self.num_failures += 1
            time.sleep(0.1)

    def num_turns(self) -> int:
        found: int = httpx.get(f"http://{self._address}/sessions/{self.session}", timeout=30).json()["turns"]
        return found


@contextlib.contextmanager
def _two_workers(journal: str) -> Iterator[Process]:
    server = start("--workers", "2", "--journal", journal, "--member", "tide", "--lease-s", "3", "--threads", "1")
    try:
        yield server
    finally:
        assert server.stop() == 0


def test_two_workers_are_one_server(postgres: str) -> None:
    with _two_workers(postgres) as server:
        assert list(_members(server.http)) == ["tide-1", "tide-2"]
        talk = Talk(server.http)
        assert {talk.ask("hi") for _ in range(4)} <= {"tide-1", "tide-2"}  # whichever of the two is asked
        assert (talk.num_turns(), talk.num_failures) == (4, 0)
        with grpc.insecure_channel(server.grpc) as channel:
            stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
            assert stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=talk.session)).history_length > 0


@pytest.mark.slow
def test_workers_go_on_after_a_crash_and_through_a_restart_of_all(postgres: str) -> None:
    with _two_workers(postgres) as server:
        pids, first = dict(re.findall(r"(tide-\d) \(pid (\d+)\)", server.banner)), _members(server.http)
        talk = Talk(server.http)
        os.kill(int(pids[talk.ask("who?")]), signal.SIGKILL)
        talk.ask("and now?")
        Workers.until(lambda: len(now := _members(server.http)) == 2 and now != first)

        before = _members(server.http)
        talk.num_failures, num_asked = 0, 2
        server.process.send_signal(signal.SIGHUP)
        while {name for name, epoch in _members(server.http).items() if epoch > before[name]} != set(before):
            talk.ask("still there?")
            num_asked += 1
        assert talk.num_failures <= 2  # one for each member that went
        assert talk.num_turns() == num_asked
