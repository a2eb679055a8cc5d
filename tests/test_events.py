"""GET /sessions/{id}/events and GET /events: what goes on, as server-sent events."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.generation import Sampled
from holdfast.serving import lifecycle
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.http import app, routes_events
from holdfast.serving.http.response import StreamTimes
from holdfast.serving.http.routes_events import EventRoutes
from holdfast.serving.keys import LOCAL_OWNER
from holdfast.sessions import watch as watching
from holdfast.sessions.history import SpanKind
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.watch import Closed, Lagged, NewTokens, SessionListener, Watch, new_tokens
from tests.serving import default_chat, held, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, open_session, refusal_of, said, until
from tests.test_grpc import create, generate
from tests.test_grpc import events_of as grpc_events_of
from tests.test_relay import chatting

Event = tuple[str, Any]


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    """The runtimes of the servers that the test starts."""
    made: list[Runtime] = []

    class Kept(Runtime):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(lifecycle, "Runtime", Kept)
    return made


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[EventRoutes]:
    """The routes of the servers that the test starts."""
    made: list[EventRoutes] = []

    class Kept(EventRoutes):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(app, "EventRoutes", Kept)
    return made


class Stream:
    """Events as they come. `until` gives all up to one of that name."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._events = self._parsed()

    async def _parsed(self) -> AsyncIterator[Event]:
        name = ""
        async for line in self.response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    async def next(self) -> Event:
        async with asyncio.timeout(20):
            return await anext(self._events)

    async def until(self, name: str) -> list[Event]:
        events = [await self.next()]
        while events[-1][0] != name:
            events.append(await self.next())
        return events

    async def rest(self) -> list[Event]:
        async with asyncio.timeout(20):
            return [event async for event in self._events]


@contextlib.asynccontextmanager
async def listening(client: httpx.AsyncClient, path: str) -> AsyncIterator[Stream]:
    async with client.stream("GET", path) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield Stream(response)


def told(events: list[Event], kind: str) -> tuple[list[int], list[str]]:
    """The ids and texts of all tokens of that kind, which must be without gaps."""
    parts = [value for name, value in events if name == "tokens" and value["kind"] == kind]
    for before, after in itertools.pairwise(parts):
        assert after["position"] == before["position"] + len(before["ids"])
    return [i for part in parts for i in part["ids"]], [text for part in parts for text in part["texts"]]


async def test_a_chat_is_told_token_by_token_and_then_as_it_was_recorded() -> None:
    async with serving(wordy_engine(forward_s=0.002), default_chat()) as server, client_of(server) as client:
        session = await open_session(client, label="l")
        async with listening(client, f"/sessions/{session}/events") as stream:
            name, state = await stream.next()
            assert (name, state["session_id"], state["label"], state["turn"]) == ("state", session, "l", None)
            reply = await client.post(chat_path(session), json=said("hi", max_tokens=20))
            events = await stream.until("turn")
            assert next(value["is_busy"] for name, value in events if name == "state")
            page = (await client.get(f"/sessions/{session}/tokens")).json()
            given, sampled = told(events, "given"), told(events, "sampled")
            assert given[0] + sampled[0] == page["ids"]
            assert given[1] + sampled[1] == page["texts"]
            tokens = [value for name, value in events if name == "tokens"]
            assert [p for value in tokens for p in value["logprobs"] or ()] == page["logprobs"][len(given[0]) :]
            assert {(value["parent"], value["turn_id"]) for value in tokens} == {(0, reply.headers["holdfast-turn"])}
            turn = events[-1][1]
            (node,) = (await client.get(f"/sessions/{session}")).json()["metadata"]["tree"]
            del node["delivered"]
            assert turn.items() >= node.items()
            assert (turn["root"], turn["turn_id"]) == (1, tokens[0]["turn_id"])
            name, state = await stream.next()
            assert (name, state["is_busy"], state["turn"], state["turns"]) == ("state", False, 1, 1)
            await client.post(f"/sessions/{session}/reward", json={"reward": 0.5})
            assert (await stream.next())[1]["reward"] == 0.5
            await client.delete(f"/sessions/{session}")
            assert (await stream.rest())[-1] == ("closed", {"why": "closed"})


async def test_who_comes_in_the_middle_of_a_turn_is_told_of_it_from_its_beginning() -> None:
    engine = wordy_engine(forward_s=0.001)
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        for history in ("strict", "forest"):
            session = await open_session(client, history=history)
            turn = asyncio.ensure_future(client.post(chat_path(session), json=said("hi", max_tokens=60)))
            before = engine.num_forwards
            await until(lambda before=before: engine.num_forwards > before + 20)
            async with listening(client, f"/sessions/{session}/events") as stream:
                events = await stream.until("turn")
            await turn
            page = (await client.get(f"/sessions/{session}/tokens")).json()
            assert told(events, "given")[0] + told(events, "sampled")[0] == page["ids"]


async def test_conversations_side_by_side_are_told_apart() -> None:
    async with serving(wordy_engine(forward_s=0.002), default_chat()) as server, client_of(server) as client:
        session = await open_session(client, history="forest")
        async with listening(client, f"/sessions/{session}/events") as stream:
            both = [client.post(chat_path(session), json=said(text, max_tokens=9)) for text in ("hi", "you")]
            replies = await asyncio.gather(*both)
            events = [*await stream.until("turn"), *await stream.until("turn")]
        for reply in replies:
            turn_id = reply.headers["holdfast-turn"]
            mine = [event for event in events if event[1].get("turn_id") == turn_id]
            number = mine[-1][1]["turn"]
            assert mine[-1][0] == "turn"
            page = (await client.get(f"/sessions/{session}/tokens", params={"turn": number})).json()
            assert told(mine, "given")[0] + told(mine, "sampled")[0] == page["ids"]


async def test_a_turn_whose_client_leaves_is_told_to_be_discarded() -> None:
    engine = wordy_engine(forward_s=0.002)
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        async with listening(client, f"/sessions/{session}/events") as stream:
            async with client.stream("POST", chat_path(session), json=said("hi", max_tokens=2000, stream=True)) as turn:
                turn_id = turn.headers["holdfast-turn"]
                await stream.until("tokens")
            events = await stream.until("discarded")
            assert events[-1][1] == {"turn_id": turn_id, "parent": 0}
            while (state := (await stream.next())[1])["is_busy"]:
                pass
            assert state["history_length"] == 0


async def test_a_token_session_is_told_by_positions() -> None:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        session = await create(server, [5, 6])
        async with listening(client, f"/sessions/{session}/events") as stream:
            assert (await stream.next())[1]["kind"] == "tokens"
            await server.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[7, 8, 9]))
            await grpc_events_of(generate(server, session, max_tokens=30))
            await server.stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=4))
            await server.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
            events = await stream.rest()
        tokens = [value for name, value in events if name == "tokens"]
        assert (tokens[0]["position"], tokens[0]["ids"], tokens[0]["kind"]) == (2, [7, 8, 9], "given")
        assert tokens[1]["position"] == 5
        assert len(told(events, "sampled")[0]) == 30
        assert [value["history_length"] for name, value in events if name == "state"][-1] == 4
        assert events[-1] == ("closed", {"why": "closed"})


async def test_who_listens_does_not_keep_a_session_from_being_parked_or_put_to_rest(tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path), "max_parked": 1}
    async with (
        serving(wordy_engine(forward_s=0, num_slabs=1), default_chat(), **options) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        async with listening(client, f"/sessions/{session}/events") as stream:
            await client.post(chat_path(session), json=said("hi"))
            for _ in range(3):
                await client.post(chat_path(await open_session(client)), json=said("hi"))
            assert server.metrics.session_total.labels("rested")._value.get() > 0
            await client.post(chat_path(session), json=said("hi", seed=2))
            events = [*await stream.until("turn"), *await stream.until("turn")]
            states = [value["state"] for name, value in events if name == "state"]
            assert [states[0], states[-1]] == ["live", "live"]
            assert "parked" in states
            assert events[-1][1]["turn"] == 2


async def test_an_upstreams_turn_is_told_when_it_is_recorded() -> None:
    for options in ({}, {"upstream_api": "tokens"}):
        async with chatting(**options) as (relay, _):
            for history in ("strict", "forest"):
                session = await open_session(relay.http, history=history)
                async with listening(relay.http, f"/sessions/{session}/events") as stream:
                    await relay.http.post(chat_path(session), json=said("hi"))
                    events = await stream.until("turn")
                page = (await relay.http.get(f"/sessions/{session}/tokens")).json()
                assert told(events, "given")[0] + told(events, "sampled")[0] == page["ids"]


# The server


async def test_the_server_tells_its_gauges_and_the_rows_that_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(routes_events, "TICK_S", 0.02)
    monkeypatch.setattr(routes_events, "_FRESH_S", 0.0)
    monkeypatch.setattr(routes_events, "_COUNTED_EVERY", 1)
    engine = wordy_engine(forward_s=0.001, num_slabs=2)
    async with (
        serving(engine, default_chat(), data_dir=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        sessions = [await open_session(client) for _ in range(3)]
        async with listening(client, "/events") as stream:
            name, first = await stream.next()
            assert name == "server"
            assert first["sessions"] == {"live": 2, "parked": 0, "busy": 0, "resting": 1}
            assert (first["slabs"], first["queue"], first["running"]) == ({"used": 2, "total": 2}, 0, 0)
            turn = asyncio.ensure_future(client.post(chat_path(sessions[2]), json=said("hi", max_tokens=40)))
            await until(lambda: engine.num_forwards > 10)
            with held(engine):
                await stream.until("server")
                while not (gauges := (await stream.until("server"))[-1][1])["ttft_p50_ms"]:
                    pass
                assert (gauges["running"], gauges["sessions"]["busy"]) == (1, 1)
            await turn
            while not (gauges := (await stream.until("server"))[-1][1])["tokens_per_s"]:
                pass
            await client.delete(f"/sessions/{sessions[2]}")
            events = await stream.until("closed")
            assert events[-1][1] == {"session_ids": [sessions[2]]}
            lengths = [
                row["history_length"]
                for name, value in events
                if name == "sessions"
                for row in value["data"]
                if row["session_id"] == sessions[2]
            ]
            assert lengths == sorted(lengths)


async def test_an_owner_is_told_of_its_own_sessions_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(routes_events, "TICK_S", 0.02)
    keys = tmp_path / "keys"
    keys.write_text("ann:secret-a\nbob:secret-b\n")
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), keys_file=str(keys)) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
        client_of(server) as nobody,
    ):
        for path in ("/events", "/sessions/x/events"):
            assert refusal_of(await nobody.get(path)) == (401, "unauthenticated")
        async with listening(bob, "/events") as stream:
            session = await open_session(ann)
            assert refusal_of(await bob.get(f"/sessions/{session}/events")) == (404, "session_not_found")
            await ann.post(chat_path(session), json=said("hi"))
            await ann.delete(f"/sessions/{session}")
            own = await open_session(bob)
            events = await stream.until("sessions")
            assert [row["session_id"] for row in events[-1][1]["data"]] == [own]
            assert {name for name, _ in events} == {"server", "sessions"}
            assert events[-2][1]["sessions"]["live"] <= 1


async def test_stateless_requests_and_caches_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_events, "TICK_S", 0.02)
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        async with listening(client, "/events") as stream:
            await client.post("/v1/chat/completions", json=said("hi"))
            session = await open_session(client, history="forest")
            await client.post(chat_path(session), json=said("hi"))
            await client.delete(f"/sessions/{session}")
            events = await stream.until("closed")
        rows = [row["session_id"] for name, value in events if name == "sessions" for row in value["data"]]
        assert set(rows) <= {session}
        assert events[-1][1] == {"session_ids": [session]}


# Listeners


async def test_a_stream_without_events_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_events, "_TIMES", StreamTimes(ping_s=0.01))
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        async with client.stream("GET", f"/sessions/{session}/events") as response:
            lines = response.aiter_lines()
            while await anext(lines) != ": ping":
                pass


async def test_only_so_many_may_listen_to_one_session_or_to_all_of_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_LISTENERS", 1)
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        for path in (f"/sessions/{session}/events", "/events"):
            async with listening(client, path) as stream:
                await stream.next()
                refused = await client.get(path)
                assert refusal_of(refused) == (429, "capacity_exhausted")
                assert "1 clients listen here already" in refused.text


async def test_a_client_that_leaves_is_forgotten(runtimes: list[Runtime]) -> None:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        (runtime,) = runtimes
        for path in (f"/sessions/{session}/events", "/events"):
            async with listening(client, path) as stream:
                await stream.next()
                assert runtime.watch.num_listeners == 1
            await until(lambda: runtime.watch.num_listeners == 0)


async def test_a_server_with_open_streams_stops_at_once_and_says_why() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(wordy_engine(forward_s=0), default_chat()))
        async with client_of(server) as client:
            session = await open_session(client)
            async with (
                listening(client, f"/sessions/{session}/events") as one,
                listening(client, "/events") as other,
            ):
                await one.next()
                await other.next()
                stopping = asyncio.ensure_future(stack.aclose())
                for stream in (one, other):
                    name, value = (await stream.rest())[-1]
                    assert (name, value["error"]["code"]) == ("error", "draining")  # not cut off, which has no name
                await stopping


async def test_a_listener_that_does_not_read_is_dropped_and_generation_goes_on(
    runtimes: list[Runtime], routes: list[EventRoutes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_TOKENS", 50)
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        chunks = routes[0]._of_session(session, LOCAL_OWNER)
        assert (await anext(chunks)).startswith(b"event: state\n")
        reply = await client.post(chat_path(session), json=said("hi", max_tokens=60))
        assert reply.json()["usage"]["completion_tokens"] == 60
        assert [chunk async for chunk in chunks] == [b"event: lagged\ndata: {}\n\n"]
        assert runtimes[0].watch.num_listeners == 0


async def test_a_listener_to_all_sessions_that_does_not_read_is_dropped(
    routes: list[EventRoutes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_ROWS", 3)
    async with serving(wordy_engine(forward_s=0, num_slabs=9), default_chat()) as server, client_of(server) as client:
        chunks = routes[0]._of_server(LOCAL_OWNER)
        await anext(chunks)
        for _ in range(4):
            await open_session(client)
        assert [chunk async for chunk in chunks][-1] == b"event: lagged\ndata: {}\n\n"


async def test_two_listeners_share_nothing_and_batches_are_put_together() -> None:
    watch = Watch()
    one, other = watch.listen("s"), watch.listen("s")
    batch = [Sampled(token=7, logprob=-1.0, sampling_logprob=-2.0)]
    for position in range(3):
        watch.tell("s", new_tokens(position, batch))
    (tokens,) = await one.take()
    assert isinstance(tokens, NewTokens)
    assert (tokens.position, tokens.ids, tokens.logprobs) == (0, [7, 7, 7], [-1.0] * 3)
    watch.tell("s", new_tokens(3, batch))
    watch.tell("s", new_tokens(9, batch))
    assert [event.position for event in await other.take() if isinstance(event, NewTokens)] == [0, 9]
    watch.leave("s", one)
    watch.leave("s", other)
    assert not watch.has_listeners("s")


async def test_a_listener_is_told_nothing_after_its_end() -> None:
    for last, event in ((Closed("closed"), Closed("closed")), (Lagged(), None)):
        listener = SessionListener()
        for position in range(0, 2000, 2):
            listener.put(NewTokens(position=position, kind=SpanKind.GIVEN, ids=[1]))
        listener.put(event or NewTokens(position=0, kind=SpanKind.GIVEN, ids=[1]))
        for _ in range(100):
            listener.put(NewTokens(position=0, kind=SpanKind.GIVEN, ids=[1]))
        assert (await listener.take())[-1] == last


async def test_bad_paths_and_methods_are_refused() -> None:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        assert (await client.head("/events")).status_code == 200
        assert refusal_of(await client.get("/sessions/nobody/events")) == (404, "session_not_found")
        assert error_of(await client.post("/events"))["code"] == "method_not_allowed"
        session = await open_session(client)
        await client.delete(f"/sessions/{session}")
        assert (await client.get(f"/sessions/{session}/events")).status_code == 404
