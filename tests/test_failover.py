"""The Python SDK with two addresses, against a real server whose addresses come and go while clients work."""

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast_sdk import Client, ConnectionFailed, Session

from tests.serving import HELD_S, SlowEngine, serving_aside


class Gate:
    """An address of a server: TCP to it and back, until it is shut. Shutting it ends every connection at once."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        self._listener.close()
        for pump in tuple(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()


class Gates:
    """Two addresses of a server, of which at least one is open."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self._gates = [Gate(target), Gate(target)]
        self._loop = loop
        self._lock = threading.Lock()
        self._turns = 0
        for gate in self._gates:
            self._do(gate.open())
        self.addresses = [f"127.0.0.1:{gate.port}" for gate in self._gates]

    def swap(self) -> None:
        """Open the one that is shut, and shut the other."""
        with self._lock:
            opening, shutting = self._gates[:: 1 if self._turns % 2 else -1]
            if self._turns:
                self._do(opening.open())
            self._do(shutting.shut())
            self._turns += 1

    def close(self) -> None:
        for gate in self._gates:
            self._do(gate.shut())

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HELD_S)


@contextlib.contextmanager
def gates_to(target: str) -> Iterator[Gates]:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            with contextlib.closing(Gates(target, loop)) as gates:
                yield gates
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def test_nothing_is_lost_or_doubled_while_addresses_come_and_go() -> None:
    num_sessions, num_rounds, every = 3, 12, 8
    num_done, outcomes = itertools.count(1), Counter[str]()

    def work(client: Client, gates: Gates, seed: int) -> None:
        with client.create_session(token_ids=[seed]) as session:
            known = [seed]  # what the history must be
            for number in range(1, num_rounds + 1):
                given = [seed, number]
                session.append(given)
                known += given
                generation = session.turn(given, max_tokens=3, seed=seed)
                if next(num_done) % every == 0:  # in the middle of this turn and of those of others
                    gates.swap()
                try:
                    sampled = [token.id for token in generation]
                    known += given + sampled
                    outcomes["turns"] += 1
                except ConnectionFailed:  # it was sent, and then the connection broke: it is there once, or not at all
                    outcomes["lost"] += 1
                    history = tokens_of(session)
                    arrived = given + generation.tokens
                    assert history[: len(known)] == known
                    assert history[len(known) :][: len(arrived)] == arrived or history == known
                    assert len(history) <= len(known) + len(given) + 3
                    known = history
                assert session.info().history_length == len(known)
            assert tokens_of(session) == known

    with (
        serving_aside(SlowEngine()) as server,
        gates_to(server.address) as gates,
        Client(gates.addresses) as client,
        ThreadPoolExecutor(num_sessions) as pool,
    ):
        for worker in [pool.submit(work, client, gates, seed) for seed in range(1, num_sessions + 1)]:
            worker.result(HELD_S)
    assert outcomes.total() == num_sessions * num_rounds


def tokens_of(session: Session) -> list[int]:
    while True:
        with contextlib.suppress(ConnectionFailed):  # a history that has begun to arrive is not begun again by itself
            return [token for chunk in session.history() for token in chunk.token_ids]
