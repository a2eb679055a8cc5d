"""The HTTP door with many clients: busy sessions, closing, clients that leave, the queue and its order."""

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest

from holdfast.chat.grammar import Compilation, Grammars, Trial
from holdfast.chats.grammar_queue import GrammarQueue
from holdfast.errors import CapacityExhausted, QueueTimeout
from holdfast.metrics import Metrics
from holdfast.sessions.admission import Admission, FairSemaphore
from holdfast.sessions.quotas import OwnerQuotas
from tests.effort import examples
from tests.serving import Server, SlowEngine, default_chat, held, serving, wordy_engine
from tests.talking import (
    chat_path,
    client_of,
    error_of,
    events_of,
    eventually,
    open_session,
    refusal_of,
    said,
    text_of,
    until,
)

CHAT = "/v1/chat/completions"
FOR_EVER = 100_000  # tokens
AT_ONCE = 5_000  # forwards: at least ten seconds, long enough for a busy machine and far from for ever


def engine_of(server: Server) -> SlowEngine:
    assert isinstance(server.worker.engine, SlowEngine)
    return server.worker.engine


def value(server: Server, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"holdfast_{name}", labels) or 0.0


def queued(server: Server, num: int) -> Any:
    return until(lambda: value(server, "queue_depth") == num)


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient, path: str, **options: Any) -> AsyncIterator[Any]:
    """The events of a reply that is under way."""
    async with client.stream("POST", path, json=said("hi", stream=True, **options)) as response:
        assert response.status_code == 200
        events = events_of(response)
        assert (await anext(events))["choices"][0]["delta"]["role"] == "assistant"
        yield events


# One turn at a time


async def test_a_second_chat_on_a_busy_session_is_409_at_once_and_harms_nobody() -> None:
    async with serving(wordy_engine(), default_chat()) as server, client_of(server) as client:
        alone, session = await open_session(client), await open_session(client)
        expected = (await client.post(chat_path(alone), json=said("hi", max_tokens=100))).json()
        body = said("hi", stream=True, max_tokens=100)
        async with client.stream("POST", chat_path(session), json=body) as first:
            events = events_of(first)
            await anext(events)
            with held(engine_of(server)):  # whoever waited for the engine would get no answer
                for options in ({}, {"stream": True}):
                    async with client_of(server) as other:
                        second = await other.post(chat_path(session), json=said("and?", **options))
                    assert refusal_of(second) == (409, "session_busy")
                    assert second.headers["x-should-retry"] == "false"
                    assert int(second.headers["retry-after"]) > 0
                    assert error_of(second)["turn_id"] == first.headers["holdfast-turn"]
            rest = [event async for event in events]
        assert rest[-1] == "[DONE]"
        assert text_of(rest) == expected["choices"][0]["message"]["content"]
        shown = (await client.get(f"/sessions/{session}")).json()
        assert (shown["turns"], shown["is_busy"]) == (1, False)


# Closing during a turn


async def test_delete_during_a_chat_ends_it_with_404_and_frees_everything() -> None:
    engine = wordy_engine(num_slabs=2)
    async with serving(engine, default_chat(), max_concurrent=1) as server, client_of(server) as client:
        session = await open_session(client)
        running = asyncio.create_task(client.post(chat_path(session), json=said("hi", max_tokens=FOR_EVER)))
        await until(lambda: engine.num_forwards > 3)
        assert (await client.delete(f"/sessions/{session}")).status_code == 204
        assert refusal_of(await running) == (404, "session_not_found")
        assert engine.num_forwards < AT_ONCE
        assert error_of(await client.get(f"/sessions/{session}"))["detail"] == "closed"
        assert refusal_of(await client.post(chat_path(session), json=said("hi"))) == (404, "session_not_found")
        assert refusal_of(await client.delete(f"/sessions/{session}")) == (404, "session_not_found")
        assert server.worker.num_free_slabs == 2
        assert (await client.post(CHAT, json=said("hi"))).status_code == 200  # the place is free again


async def test_delete_during_a_stream_ends_it_with_an_error_event() -> None:
    engine = wordy_engine(num_slabs=2)
    async with serving(engine, default_chat(), max_concurrent=1) as server, client_of(server) as client:
        session = await open_session(client)
        async with streaming(client, chat_path(session), max_tokens=FOR_EVER) as events:
            assert (await client.delete(f"/sessions/{session}")).status_code == 204
            rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "session_not_found"
        await until(lambda: server.worker.num_free_slabs == 2)
        assert (await client.post(CHAT, json=said("hi"))).status_code == 200


async def test_delete_of_a_session_whose_turn_is_queued_frees_its_place_in_the_queue() -> None:
    async with serving(wordy_engine(), default_chat(), max_concurrent=1) as server, client_of(server) as client:
        session = await open_session(client)
        async with streaming(client, CHAT, max_tokens=FOR_EVER):
            waiting = asyncio.create_task(client.post(chat_path(session), json=said("hi")))
            await queued(server, 1)
            assert (await client.delete(f"/sessions/{session}")).status_code == 204
        assert refusal_of(await waiting) == (404, "session_not_found")
        assert (await client.post(CHAT, json=said("hi"))).status_code == 200
        assert value(server, "queue_depth") == 0


# Clients that leave


async def leave(server: Server, path: str, body: dict[str, Any], after_s: float) -> None:
    """Ask, and be gone after a while, whatever has come until then."""
    async with client_of(server) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s), client.stream("POST", path, json=body) as response:
                async for _ in response.aiter_bytes():
                    pass


async def leave_when(server: Server, path: str, body: dict[str, Any], condition: Callable[[], bool]) -> None:
    """Ask, and be gone once something has happened. A session may still be busy with whoever left before."""
    async with client_of(server) as client:
        while True:
            asking = asyncio.create_task(client.post(path, json=body))
            await until(lambda asking=asking: asking.done() or condition())
            if not asking.done():
                break
            assert asking.result().status_code == 409
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_hundred_clients_that_leave_at_random_moments_cost_nothing() -> None:
    source, num_slabs = random.Random(4), 6
    engine = wordy_engine(num_slabs=num_slabs, forward_s=0.001)
    async with serving(engine, default_chat(), max_concurrent=3) as server, client_of(server) as client:
        sessions = [await open_session(client) for _ in range(2)]

        async def storm() -> None:
            paths = [CHAT, CHAT, "/v1/completions", *map(chat_path, sessions)]
            leaving = []
            for _ in range(50):
                path = source.choice(paths)
                long = "word " * source.choice((1, 150))
                options = {"stream": source.random() < 0.5, "max_tokens": source.choice((5, FOR_EVER))}
                body = said(long, **options)
                if path == "/v1/completions":
                    body = {"prompt": long, "n": source.choice((1, 2))} | options
                leaving.append(leave(server, path, body, source.uniform(0, 0.6)))
            await asyncio.gather(*leaving)
            await until(lambda: server.worker.num_free_slabs == num_slabs - len(sessions))
            await until(lambda: value(server, "queue_depth") == 0)

        await storm()
        gc.collect()
        tasks, memory = len(asyncio.all_tasks()), psutil.Process().memory_info().rss
        await storm()
        gc.collect()
        assert psutil.Process().memory_info().rss - memory < 16 << 20
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert value(server, "admission_total", outcome="left") > 0
        views = (await client.get("/sessions")).json()["data"]
        assert {view["session_id"] for view in views} == set(sessions)
        for session in sessions:
            answer = await once_free(client, session, said("still there?"))
            assert answer.status_code == 200, answer.text
        # all places at the entrance have come back as well
        assert (await client.post("/v1/completions", json={"prompt": "hi", "n": 3, "max_tokens": 2})).status_code == 200
        assert value(server, "cache_invariant_violations_total", kind="inv1") == 0


async def once_free(client: httpx.AsyncClient, session: str, body: dict[str, Any]) -> httpx.Response:
    """The session's answer as soon as the turns of clients who left are taken back."""
    return await eventually(
        lambda: client.post(chat_path(session), json=body), lambda response: response.status_code != 409
    )


async def test_a_turn_whose_client_left_is_not_recorded_and_the_next_one_is_as_if_it_never_was() -> None:
    engine = wordy_engine()
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        session, untouched = await open_session(client), await open_session(client)
        replies = []
        for one in (session, untouched):
            first = (await client.post(chat_path(one), json=said("hi"))).json()["choices"][0]["message"]["content"]
            if one == session:
                body = said("hi", first, "x", max_tokens=FOR_EVER)
                for after_s in (0.0, 0.02):
                    await leave(server, chat_path(one), body, after_s)
                enough = engine.num_forwards + 5
                await leave_when(server, chat_path(one), body, lambda enough=enough: engine.num_forwards > enough)
            turn = await once_free(client, one, said("hi", first, "and?"))
            assert turn.status_code == 200, turn.text
            replies.append(turn.json()["choices"][0]["message"])
            assert (await client.get(f"/sessions/{one}")).json()["turns"] == 2
        assert replies[0] == replies[1]


async def test_the_engine_stops_soon_after_a_client_has_left() -> None:
    engine = wordy_engine()
    async with serving(engine, default_chat()) as server:
        for stream in (True, False):
            begun = engine.num_forwards + 5
            body = said("hi", stream=stream, max_tokens=FOR_EVER)
            await leave_when(server, CHAT, body, lambda begun=begun: engine.num_forwards > begun)
            await until(lambda: server.worker.num_free_slabs == 4)
            assert engine.num_forwards < begun + AT_ONCE
        before = engine.num_forwards
        async with client_of(server) as client:
            await client.post(CHAT, json=said("hi", max_tokens=3))
        assert engine.num_forwards <= before + 4


# The queue


async def test_the_queue_is_first_come_first_served() -> None:
    async with serving(wordy_engine(), default_chat(), max_concurrent=1) as server, client_of(server) as client:
        session = await open_session(client)
        done: list[int] = []

        async def ask(number: int) -> None:
            path = chat_path(session) if number == 3 else CHAT
            response = await client.post(path, json=said("hi", max_tokens=2))
            assert response.status_code == 200
            done.append(number)

        async with asyncio.TaskGroup() as group, streaming(client, CHAT, max_tokens=FOR_EVER):
            for number in range(6):
                group.create_task(ask(number))
                await queued(server, number + 1)
        assert done == list(range(6))
        assert value(server, "admission_total", outcome="admitted") == 7


async def test_whoever_waited_long_enough_is_told_to_come_back_later() -> None:
    async with (
        serving(wordy_engine(), default_chat(), max_concurrent=1, queue_max_wait_s=0.3) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        async with streaming(client, CHAT, max_tokens=FOR_EVER):
            for path in (CHAT, chat_path(session)):
                started = time.monotonic()
                response = await client.post(path, json=said("hi", stream=path == CHAT))
                assert refusal_of(response) == (429, "queue_timeout")
                assert int(response.headers["retry-after"]) > 0
                assert time.monotonic() - started >= 0.3
        assert value(server, "admission_total", outcome="timed_out") == 2
        answer = await client.post(chat_path(session), json=said("hi"))  # and the session is as it was
        assert (answer.status_code, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)


async def test_where_nobody_may_wait_whoever_comes_too_many_is_429_at_once() -> None:
    async with (
        serving(wordy_engine(), default_chat(), max_concurrent=1, admission="reject") as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        async with streaming(client, CHAT, max_tokens=FOR_EVER):
            with held(engine_of(server)):  # whoever waited for the engine would get no answer
                for path in (CHAT, chat_path(session)):
                    response = await client.post(path, json=said("hi"))
                    assert refusal_of(response) == (429, "capacity_exhausted")
                    assert int(response.headers["retry-after"]) > 0
        assert value(server, "admission_total", outcome="rejected") == 2


async def test_a_full_queue_turns_away_whoever_comes_next() -> None:
    async with (
        serving(wordy_engine(), default_chat(), max_concurrent=1, queue_max=1) as server,
        client_of(server) as client,
    ):
        async with streaming(client, CHAT, max_tokens=FOR_EVER):
            waiting = asyncio.create_task(client.post(CHAT, json=said("hi")))
            await queued(server, 1)
            assert refusal_of(await client.post(CHAT, json=said("hi"))) == (429, "capacity_exhausted")
        assert (await waiting).status_code == 200


async def test_a_queued_client_that_left_frees_its_place() -> None:
    async with serving(wordy_engine(), default_chat(), max_concurrent=1) as server, client_of(server) as client:
        session = await open_session(client)
        async with streaming(client, CHAT, max_tokens=FOR_EVER):
            gone = [asyncio.create_task(leave(server, path, said("hi"), 30)) for path in (CHAT, chat_path(session))]
            await queued(server, 2)
            last = asyncio.create_task(client.post(CHAT, json=said("hi")))
            await queued(server, 3)
            for task in gone:
                task.cancel()
            await queued(server, 1)
        assert (await last).status_code == 200
        assert value(server, "admission_total", outcome="left") == 2
        assert (await client.post(chat_path(session), json=said("hi"))).status_code == 200


# The entrance alone


@dataclass(eq=False)
class Visitor:
    """Wants `num` places, holds them until told to go."""

    number: int
    num: int
    owner: str = ""
    is_in: bool = False
    going: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    async def visit(self, admission: Admission) -> None:
        async with admission.admitted(self.num, owner=self.owner):
            self.is_in = True
            try:
                await self.going.wait()
            finally:
                self.is_in = False


class Entrance:
    """An entrance and its visitors, who come, go and give up as `source` has it."""

    def __init__(self, source: random.Random, *, owners: str = "a", owner_places: int = 0) -> None:
        self.source = source
        self.owners = owners
        self.places = source.randint(1, 4)
        self.owner_places = min(owner_places or self.places, self.places)
        quotas = OwnerQuotas(max_running=owner_places)
        self.admission = Admission(self.places, max_queue=100, max_wait_s=0, quotas=quotas, metrics=Metrics())
        self.admission._places._take = self.take  # type: ignore[method-assign]
        self.passed: Counter[tuple[object, str]] = Counter()
        self.visitors: list[Visitor] = []
        self.num_came = 0

    async def step(self) -> None:
        happens = self.source.choice((self.come, self.come, self.go, self.give_up))
        happens()
        if self.source.random() < 0.4:
            await self.settle()
        else:  # the next thing happens in the same moment, or in the middle of this one
            for _ in range(self.source.randint(0, 3)):
                await asyncio.sleep(0)

    def come(self) -> None:
        num, owner = self.source.randint(1, self.owner_places), self.source.choice(self.owners)
        visitor = Visitor(self.num_came, num, owner)
        self.num_came += 1
        visitor.task = asyncio.create_task(visitor.visit(self.admission))
        self.visitors.append(visitor)

    def take(self, num: int, owner: str) -> None:
        """As the entrance does, and count whom the next one of each other owner had to let pass: each owner once."""
        places = self.admission._places
        for other, waiting in places._waiting.items():
            if num > 0 and other != owner and self.owner_places == self.places:  # else one may wait for one's own owner
                self.passed[waiting[0][1], owner] += 1
                assert self.passed[waiting[0][1], owner] == 1
        FairSemaphore._take(places, num, owner)

    def go(self) -> None:
        if self.visitors:
            self.source.choice(self.visitors).going.set()

    def give_up(self) -> None:
        if self.visitors and (task := self.source.choice(self.visitors).task):
            task.cancel()

    async def settle(self) -> None:
        """Let everything happen that can, then look: never too many, nobody overtaken, no place left empty."""
        for _ in range(4 * len(self.visitors) + 4):
            await asyncio.sleep(0)
            assert sum(visitor.num for visitor in self.visitors if visitor.is_in) <= self.places
        self.visitors = [visitor for visitor in self.visitors if visitor.task and not visitor.task.done()]
        inside = [visitor for visitor in self.visitors if visitor.is_in]
        free = self.places - sum(visitor.num for visitor in inside)
        is_any_due, is_any_kept = False, False
        for owner in self.owners:
            own = [visitor for visitor in inside if visitor.owner == owner]
            taken = sum(visitor.num for visitor in own)
            assert taken <= self.owner_places
            waiting = [visitor for visitor in self.visitors if visitor.owner == owner and not visitor.is_in]
            if not waiting:
                continue
            assert all(visitor.number < waiting[0].number for visitor in own)
            if self.owner_places == self.places or taken + waiting[0].num <= self.owner_places:
                is_any_due, is_any_kept = True, is_any_kept or waiting[0].num > free
        assert is_any_kept or not is_any_due  # no place is empty that the next one could have

    async def close(self) -> None:
        """Nobody starves: once all go who are in, everyone gets in. Then all places are free."""
        for visitor in self.visitors:
            visitor.going.set()
        await self.settle()
        assert not self.visitors
        async with asyncio.timeout(30), self.admission.admitted(self.owner_places):
            pass
        assert self.admission._places.num_taken == 0


@pytest.mark.parametrize(("owners", "owner_places"), [("a", 0), ("abc", 0), ("abc", 1)])
async def test_whoever_comes_goes_or_gives_up_in_whatever_order_the_entrance_is_fair(
    owners: str, owner_places: int
) -> None:
    for seed in range(examples(100)):
        entrance = Entrance(random.Random(seed), owners=owners, owner_places=owner_places)
        for _ in range(40):
            await entrance.step()
        await entrance.close()


async def test_a_thousand_requests_of_one_owner_are_one_place_ahead_of_another_owners_first() -> None:
    admission = Admission(1, max_queue=2000, max_wait_s=0, metrics=Metrics())
    order: list[str] = []

    async def visit(owner: str) -> None:
        async with admission.admitted(owner=owner):
            order.append(owner)

    async with asyncio.TaskGroup() as group, admission.admitted(owner="a"):
        for owner in ("a" * 1000) + "bb":
            group.create_task(visit(owner))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "".join(order[:6]) == "ababaa"
    assert len(order) == 1002


async def test_a_request_for_all_places_gets_them_though_small_ones_keep_coming() -> None:
    admission = Admission(3, max_queue=100, max_wait_s=0, metrics=Metrics())
    order: list[str] = []

    async def visit(owner: str, num: int) -> None:
        async with admission.admitted(num, owner=owner):
            order.append(owner)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(visit("small", 1))
            if number == 10:
                group.create_task(visit("large", 3))
            await asyncio.sleep(0)
    assert order.index("large") < 20


async def test_the_one_whom_another_owner_replaces_in_a_full_queue_is_told_and_loses_no_place() -> None:
    admission = Admission(1, max_queue=3, max_wait_s=0, metrics=Metrics())
    async with admission.admitted(owner="a"):
        first = [asyncio.create_task(_entered(admission, "a")) for _ in range(3)]
        await asyncio.sleep(0)
        second = asyncio.create_task(_entered(admission, "b"))
        await asyncio.sleep(0)
        first[1].cancel()  # in the same moment
        with pytest.raises(CapacityExhausted):
            await first[2]
    await asyncio.gather(first[0], second)
    async with asyncio.timeout(30), admission.admitted():
        pass


async def test_a_timeout_in_the_moment_of_admission_loses_no_place() -> None:
    source, admission = random.Random(7), Admission(2, max_queue=50, max_wait_s=0.01, metrics=Metrics())
    inside, most, outcomes = 0, 0, {"in": 0, "late": 0, "left": 0}

    async def visit() -> None:
        nonlocal inside, most
        try:
            async with admission.admitted():
                inside += 1
                most = max(most, inside)
                outcomes["in"] += 1
                try:
                    await asyncio.sleep(source.uniform(0, 0.01))
                finally:
                    inside -= 1
        except QueueTimeout:
            outcomes["late"] += 1
        except asyncio.CancelledError:
            outcomes["left"] += 1
            raise

    for _ in range(20):
        tasks = [asyncio.create_task(visit()) for _ in range(20)]
        await asyncio.sleep(source.uniform(0, 0.02))
        for task in source.sample(tasks, 5):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 2
    assert min(outcomes.values()) > 0
    async with admission.admitted(2):  # both places are back
        assert inside == 0


async def test_a_full_queue_and_no_queue_refuse_without_waiting() -> None:
    for max_queue in (0, 1):
        admission = Admission(1, max_queue=max_queue, max_wait_s=0, metrics=Metrics())
        async with admission.admitted(), asyncio.TaskGroup() as group:
            waiting = [group.create_task(_entered(admission)) for _ in range(max_queue)]
            await asyncio.sleep(0)
            with pytest.raises(CapacityExhausted):
                await admission.admitted().__aenter__()
            for task in waiting:
                task.cancel()


async def _entered(admission: Admission, owner: str = "") -> None:
    async with admission.admitted(owner=owner):
        pass


async def test_a_session_whose_turn_is_queued_is_not_evicted() -> None:
    engine = wordy_engine(num_slabs=3)
    async with serving(engine, default_chat(), max_concurrent=1) as server, client_of(server) as client:
        session, _ = await open_session(client), await open_session(client)
        async with streaming(client, CHAT, max_tokens=FOR_EVER):
            waiting = asyncio.create_task(client.post(chat_path(session), json=said("hi")))
            await queued(server, 1)
            await open_session(client)  # there is another idle one to go for it
        assert (await waiting).status_code == 200


async def test_a_server_that_drains_refuses_queued_and_new_requests_and_finishes_what_runs() -> None:
    leaving, engine = contextlib.AsyncExitStack(), wordy_engine()
    server = await leaving.enter_async_context(serving(engine, default_chat(), drain_s=60, max_concurrent=1))
    async with client_of(server) as client:
        session = await open_session(client)
        with held(engine):
            running = asyncio.create_task(client.post(CHAT, json=said("hi")))
            await until(lambda: engine.num_forwards > 0)
            waiting = [asyncio.create_task(client.post(path, json=said("hi"))) for path in (CHAT, chat_path(session))]
            await queued(server, 2)
            closing = asyncio.create_task(leaving.aclose())
            for answer in [await answer for answer in waiting]:
                assert refusal_of(answer) == (503, "draining")
                assert answer.headers["retry-after"] == "5"
            for path in ("/sessions", CHAT, chat_path(session)):
                assert refusal_of(await client.post(path, json=said("hi"))) == (503, "draining")
            assert (await client.get("/readyz")).json() == {"status": "draining"}
            assert not running.done()
        assert (await running).status_code == 200
    await closing


async def test_requests_that_outlast_a_drain_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    leaving = contextlib.AsyncExitStack()
    server = await leaving.enter_async_context(serving(wordy_engine(), default_chat(), drain_s=0.1))
    async with client_of(server) as client:
        first, second = [await open_session(client) for _ in range(2)]
        running = asyncio.create_task(client.post(chat_path(first), json=said("hi", max_tokens=FOR_EVER)))
        async with (
            streaming(client, CHAT, max_tokens=FOR_EVER) as stateless,
            streaming(client, chat_path(second), max_tokens=FOR_EVER) as turn,
        ):
            await leaving.aclose()
            assert refusal_of(await running) == (503, "draining")
            for events in (stateless, turn):
                assert [event async for event in events][-1]["error"]["code"] == "draining"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_export_that_outlasts_a_drain_is_cut_off_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    leaving = contextlib.AsyncExitStack()
    server = await leaving.enter_async_context(serving(wordy_engine(), default_chat(), drain_s=0.1))
    async with client_of(server) as client:
        session = await open_session(client)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("starlette.responses.StreamingResponse.stream_response", _endless)
            async with client.stream("GET", f"/sessions/{session}/export") as response:
                assert response.status_code == 200
                await leaving.aclose()
                with pytest.raises(httpx.RemoteProtocolError):
                    await response.aread()
    assert "Traceback" not in caplog.text


async def _endless(response: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"1", "more_body": True})
    await asyncio.sleep(600)


# Grammars


def hostile_schema(index: int) -> dict[str, Any]:
    """Takes as long to compile as it may: a second of processor time, in a process of its own."""
    patterns = [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{k}}}$"} for k in range(2, 40)]
    return schema_body({"allOf": [*patterns, {"description": str(index)}]})


def schema_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def num_trials() -> int:
    def runs(child: psutil.Process) -> bool:
        try:
            return bool(child.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:  # it has ended since it was listed
            return False

    return sum(map(runs, psutil.Process().children()))


async def test_schemas_whose_clients_left_are_dropped_and_their_processes_killed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a:{'a' * 32}\nb:{'b' * 32}\n")
    async with (
        serving(wordy_engine(), default_chat(), keys_file=str(keys)) as server,
        client_of(server, "a" * 32) as one,
        client_of(server, "b" * 32) as other,
    ):
        before = num_trials()
        asking = [asyncio.create_task(one.post(CHAT, json=said("hi", **hostile_schema(i)))) for i in range(12)]
        await until(lambda: num_trials() == before + 2)  # as many as one owner may have
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: num_trials() == before, timeout_s=5)
        started = time.monotonic()
        schema = schema_body({"type": "object", "properties": {"a": {"type": "integer"}}})
        for options in ({}, schema):
            assert (await other.post(CHAT, json=said("hi", **options))).status_code == 200
        assert time.monotonic() - started < 8  # twelve seconds of processor time would have come before


@dataclass(eq=False)
class HeldGrammars:
    """Compiles nothing until it is told to, and tells what it compiles."""

    may_end: threading.Event = field(default_factory=threading.Event)
    begun: list[tuple[str, str]] = field(default_factory=list)

    def kept(self, compilation: Compilation) -> None:
        return None

    def compiled(self, compilation: Compilation, trial: Trial) -> str:
        self.begun.append((trial.owner, compilation.grammar))
        assert self.may_end.wait(60)
        return compilation.grammar


async def test_owners_take_turns_and_one_owner_never_has_all_threads() -> None:
    held_grammars = HeldGrammars()
    queue = GrammarQueue(cast(Grammars, held_grammars))

    def asks(owner: str, *names: str) -> "list[asyncio.Task[Any]]":
        return [asyncio.create_task(queue.compiled(owner, Compilation([], name))) for name in names]

    asking = asks("a", *(f"a{i}" for i in range(6)))
    await until(lambda: len(held_grammars.begun) == 2)
    asking += asks("b", "b0", "b1", "b2")
    await until(lambda: len(held_grammars.begun) == 3)
    left = asks("c", "c0", "c1")
    asking += asks("d", "d0")
    asking += asks("e", "d0")  # the same grammar: compiled once
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    held_grammars.may_end.set()
    assert await asyncio.gather(*asking) == [*(f"a{i}" for i in range(6)), "b0", "b1", "b2", "d0", "d0"]
    assert [name for _, name in held_grammars.begun[:3]] == ["a0", "a1", "b0"]
    assert {name for _, name in held_grammars.begun[3:6]} == {"a2", "b1", "d0"}
    assert len(held_grammars.begun) == 10


async def test_an_owner_with_too_many_schemas_is_turned_away_and_others_are_not() -> None:
    held_grammars = HeldGrammars()
    queue = GrammarQueue(cast(Grammars, held_grammars))
    asking = [asyncio.create_task(queue.compiled("a", Compilation([], f"a{i}"))) for i in range(34)]
    await until(lambda: len(held_grammars.begun) == 2)
    with pytest.raises(CapacityExhausted, match="too many schemas"):
        await queue.compiled("a", Compilation([], "one more"))
    asking.append(asyncio.create_task(queue.compiled("b", Compilation([], "b0"))))
    await until(lambda: len(held_grammars.begun) == 3)
    held_grammars.may_end.set()
    assert len(await asyncio.gather(*asking)) == 35
