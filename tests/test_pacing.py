"""Requests wait where they take more than their share of the cores that compute, and nowhere else."""

import asyncio
from dataclasses import dataclass

import httpx
import pytest

from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.pacing import SHARE, Pacing
from tests.serving import SlowEngine, held, serving

CORES = 2
ALLOWED = SHARE * CORES  # seconds of CPU a second


@dataclass
class Machine:
    now: float = 100.0
    used: float = 7.0
    cores: int = CORES

    def pacing(self) -> Pacing:
        return Pacing(lambda: self.cores, clock=lambda: self.now, used=lambda: self.used)

    def run(self, seconds: float, cpu: float) -> None:
        self.now += seconds
        self.used += cpu


def _hammered(machine: Machine, cpu: float, num: int) -> float:
    """What a client gets who sends the next request at once: the share of a core that its requests take."""
    pacing = machine.pacing()
    pacing.due_s()
    began, used = machine.now, machine.used
    for _ in range(num):
        machine.run(pacing.due_s(), 0.0)
        machine.run(cpu, cpu)
    return (machine.used - used) / (machine.now - began)


def test_requests_that_come_as_fast_as_they_can_take_their_share_of_the_cores() -> None:
    assert _hammered(Machine(), 0.0005, 2000) == pytest.approx(ALLOWED, rel=0.2)


def test_more_cores_bear_more_requests() -> None:
    assert _hammered(Machine(cores=16), 0.0005, 2000) == pytest.approx(SHARE * 16, rel=0.2)


def test_a_request_now_and_then_does_not_wait() -> None:
    machine = Machine()
    pacing = machine.pacing()
    for _ in range(50):
        machine.run(0.1, 0.004)
        assert pacing.due_s() == 0.0


def test_nobody_waits_where_nothing_is_computed_on_these_cores() -> None:
    assert _hammered(Machine(cores=0), 0.001, 100) == pytest.approx(1.0)


def test_no_request_waits_for_long_whatever_the_loop_had_to_do() -> None:
    machine = Machine()
    pacing = machine.pacing()
    pacing.due_s()
    machine.run(30.0, 30.0)
    assert pacing.due_s() == pytest.approx(0.05)


def test_what_was_used_while_nothing_was_computed_does_not_count() -> None:
    machine = Machine(cores=0)
    pacing = machine.pacing()
    pacing.due_s()
    machine.run(10.0, 10.0)
    pacing.due_s()
    machine.cores = CORES
    machine.run(0.001, 0.001)
    assert pacing.due_s() == 0.0


async def test_requests_at_both_endpoints_are_paced_while_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def note(pacing: Pacing) -> float:
        asked.append(pacing._num_busy_cores())
        return 0.0

    monkeypatch.setattr(Pacing, "due_s", note)
    engine = SlowEngine()
    engine.num_cores = 3
    async with serving(engine) as server, httpx.AsyncClient(base_url=f"http://{server.http}") as client:
        opened = await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[1]))
        running = server.stub.Generate(pb.GenerateRequest(session_id=opened.session_id, max_tokens=200))
        events = aiter(running)
        await anext(events)
        asked.clear()
        with held(engine):
            assert (await client.get("/health")).status_code == 200
            await server.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert asked == [3, 3]
            await client.post("/v1/chat/completions", json={"messages": []})
            assert asked == [3, 3]  # a request for tokens is not held up
        assert [event async for event in events][-1].HasField("done")
        async with asyncio.timeout(30):
            while asked[-1]:  # the engine's thread rests a moment after the last event
                await client.get("/health")
