"""A client that asks the HTTP door as fast as it can, beside a stream that decodes on the same cores. A process."""

import asyncio
import sys
import time
from collections.abc import Iterator

from holdfast.bench.processes import Child, obey, started
from holdfast.bench.server_process import ServerAddress, serving

_TURNS = 3
_CONNECTIONS = 8
_TOKENS = 400
_START_S = 60.0


def hammered_share(model: str, seconds: float) -> Iterator[tuple[float, float]]:
    """Tokens a second of one stream, alone and hammered, in turns."""
    with serving(model, "--proposer", "none") as served, started("hammer", served.http) as hammer:
        hammer.read(str, timeout_s=_START_S)
        _speed(served, seconds / 4)
        for _ in range(_TURNS):
            alone = _speed(served, seconds)
            _tell(hammer, is_on=True)
            try:
                hammered = _speed(served, seconds)
            finally:
                num_answers = _tell(hammer, is_on=False)
            assert num_answers > 0, "the client got no answer"
            yield alone, hammered


def _tell(hammer: Child, *, is_on: bool) -> int:
    return hammer.ask(is_on, int, timeout_s=_START_S)


def _speed(served: ServerAddress, seconds: float) -> float:
    """Tokens a second through the gRPC door, over one session."""
    from holdfast_sdk import Client

    with Client(served.grpc) as client, client.create_session() as session:
        session.append(list(range(100, 612)))
        started_at, num = time.perf_counter(), 0
        while time.perf_counter() - started_at < seconds:
            for _ in session.generate(max_tokens=_TOKENS, seed=num, temperature=1.0):
                num += 1
                if time.perf_counter() - started_at >= seconds:
                    break
        return num / (time.perf_counter() - started_at)


class _Hammer:
    def __init__(self, url: str) -> None:
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []
        self._num_answers = 0

    async def obey(self, line: bytes) -> int:
        """`true` starts, `false` stops; the number of answers so far."""
        if line.strip() == b"true":
            self._tasks = [asyncio.create_task(self._ask()) for _ in range(_CONNECTIONS)]
        else:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._num_answers

    async def _ask(self) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as client:
            while True:
                async with client.get(f"{self._url}/v1/models") as reply:
                    await reply.read()
                    self._num_answers += 1


if __name__ == "__main__":
    asyncio.run(obey("ready", _Hammer(sys.argv[1]).obey))
