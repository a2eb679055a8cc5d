"""SGLang's own router between Holdfast and two fake SGLang workers: a session stays on one, and a gone one is survived.

    python3 -m venv build/router && build/router/bin/pip install sglang-router==0.3.2
    .venv/bin/python -m tests.router build/router/bin/python

The router writes chat requests anew and leaves out what it does not know, token ids too; so `--upstream-api generate`.
"""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path
from typing import Any

from holdfast.backends.sglang import SGLangBackend
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import Seen
from tests.chaos import UpstreamProcess
from tests.relaying import Relay, relaying
from tests.serving import default_chat
from tests.talking import chat_path, open_session, said
from tests.test_upstreams import fake_model

NUM_SESSIONS = 12


class Worker(FakeSGLang):
    """Behind a router, which asks more of a worker than we do."""

    is_routed = True

    def _routes(self) -> Any:
        return super()._routes() | {
            ("GET", path): self._about for path in ("/server_info", "/get_server_info", "/model_info")
        }

    async def _about(self, request: Any, reply: Any) -> None:
        await reply.send({"model_path": self.model.name, "served_model_name": self.model.name, "is_generation": True})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def router(python: str, port: int, workers: list[Worker], log: Path | None) -> UpstreamProcess:
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "manual", "--worker-urls", *(worker.url for worker in workers)]
    command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    return UpstreamProcess(command, f"http://127.0.0.1:{port}", log=log)


async def homes(relay: Relay, workers: list[Worker], sessions: list[str]) -> list[set[str]]:
    """The routing keys that each worker saw while every session had a turn. If a worker is gone a request may fail."""
    for worker in workers:
        worker.requests.clear()
    for session in sessions:
        for _ in range(20):
            answer = await relay.http.post(chat_path(session), json=said("Hi", max_tokens=2))
            if answer.status_code == 200:
                break
            print(f"  {answer.status_code}: {answer.text[:200]}")
            await asyncio.sleep(0.3)
        assert answer.status_code == 200, answer.text
    found = [{_header(seen, "x-smg-routing-key") for seen in worker.requests} for worker in workers]
    return [keys - {"", "holdfast-probe"} for keys in found]


def _header(seen: Seen, name: str) -> str:
    return {key.lower(): value for key, value in seen.headers.items()}.get(name, "")


async def check(python: str, log: Path | None = None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(fake_model())) for _ in range(2)]
        process = router(python, free_port(), workers, log)
        process.start()
        stack.callback(process.kill)
        options: Any = {"kind": SGLangBackend, "upstream_api": "generate", "retry_aborted": 1}
        relaying_to = relaying(process.url, default_chat(), fake_model().vocab_size, **options)
        relay = await stack.enter_async_context(relaying_to)
        async with asyncio.timeout(60):
            while (await relay.http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
        sessions = [await open_session(relay.http) for _ in range(NUM_SESSIONS)]
        first = await homes(relay, workers, sessions)
        print("sessions on each worker:", [len(found) for found in first])
        assert all(first), "one worker has all sessions"
        assert not first[0] & first[1], "a session was on two workers"
        assert len(first[0] | first[1]) == NUM_SESSIONS
        assert await homes(relay, workers, sessions) == first, "a session moved"
        traced = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        await relay.http.post(chat_path(sessions[0]), json=said("Hi", max_tokens=1), headers=traced)
        told = [seen for worker in workers for seen in worker.requests if _header(seen, "traceparent")]
        print("the worker sees traceparent:", bool(told))
        await workers[0]._runner.cleanup()
        after = await homes(relay, workers, sessions)
        print("after one worker is gone:", [len(found) for found in after])
        assert after == [set(), first[0] | first[1]]
        for session in sessions:
            shown = (await relay.http.get(f"/sessions/{session}?branches=all")).json()
            assert len(shown["records"]) == (4 if session == sessions[0] else 3)
            assert shown["records"][0]["logprob_kind"] == "raw"
    print("ok")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__)
        sys.exit(2)
    asyncio.run(check(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None))
