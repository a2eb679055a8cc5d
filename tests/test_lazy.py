"""Sessions that rest: read when they are asked for, put to rest when others need the room, and the same ever after."""

import asyncio
import contextlib
import gc
import random
import re
import sqlite3
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from holdfast.backends.embedded import EmbeddedBackend
from holdfast.chats.service import Trajectories
from holdfast.engine.worker import Worker
from holdfast.errors import (
    CapacityExhausted,
    Draining,
    Fenced,
    HoldfastError,
    JournalFailed,
    QuotaExceeded,
    RecordUncertain,
    SessionElsewhere,
    SessionNotFound,
)
from holdfast.generation import SamplingParams
from holdfast.serving import storage
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.sessions import residence
from holdfast.sessions.journal.base import Entry, Rewarded, SessionClosed, StoredSession, TokensSampled, TurnRecorded
from holdfast.sessions.journal.snapshots import SnapshotStore, open_tier
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.quotas import OwnerQuotas
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.view import SessionState, Wanted
from tests.effort import examples
from tests.postgres import fresh_database
from tests.serving import Server, SlowEngine, default_chat, model_of, serving, wordy_engine
from tests.talking import chat_path, client_of, eventually, open_session, refusal_of, said, until
from tests.test_grpc import create, events_of, generate

OWNER = "ann"
GREEDY = SamplingParams(seed=0, max_tokens=4, temperature=0)


# The same as a server that keeps all in memory


@dataclass
class Drive:
    """Does the same on any server, by a seed, and notes what it is told, with sessions by number instead of by id."""

    server: Server
    client: httpx.AsyncClient
    draw: random.Random
    ids: list[str] = field(default_factory=list)
    talks: dict[str, list[list[str]]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    seen: list[object] = field(default_factory=list)

    async def step(self, number: int) -> None:
        draw = self.draw
        rare = ["open", "tokens", "named", "fork", "reward", "look", "samples", "close"]
        act = draw.choice(["talk", "talk", "talk", *rare])
        talks = sorted(self.talks, key=self.ids.index)
        if act == "open" or not talks:
            history = draw.choice(["strict", "forest"])
            session = self._known(await open_session(self.client, history=history, label=draw.choice("xy")))
            self.talks[session] = [[] for _ in range(3 if history == "forest" else 1)]
        elif act == "tokens":
            await self._tokens(number)
        elif act == "named":
            session = draw.choice(["one", "two"])
            body, headers = said(f"{number}"), {"holdfast-session": session}
            answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
            self._known(answer.headers["holdfast-session"])
            self._note(answer)
        elif act == "talk":
            await self._talk(draw.choice(talks), number)
        elif act == "fork":
            source = draw.choice(talks)
            fork = self._known((await self.client.post(f"/sessions/{source}/fork")).json()["session_id"])
            self.talks[fork] = [list(texts) for texts in self.talks[source][-1:]]
        elif act == "reward":
            body = {"reward": number / 2, "turn": draw.choice([None, 1])}
            self._note(await self.client.post(f"/sessions/{draw.choice(talks)}/reward", json=body))
        elif act == "samples":
            self._note(await self.client.post(f"/sessions/{draw.choice(talks)}/samples", json={"format": "json"}))
        elif act == "close" and len(talks) > 4:
            session = draw.choice(talks)
            assert (await self.client.delete(f"/sessions/{session}")).status_code == 204
            assert refusal_of(await self.client.get(f"/sessions/{session}")) == (404, "session_not_found")
            del self.talks[session]
        else:
            await self.look(draw.choice(talks))

    async def _talk(self, session: str, number: int) -> None:
        texts = self.draw.choice(self.talks[session])
        if len(texts) >= 2 and self.draw.random() < 0.3:
            del texts[-2:]  # a retry branches
        body, headers = said(*texts, f"{number}", max_tokens=self.draw.randint(1, 6)), {"idempotency-key": f"{number}"}
        answer = await self.client.post(chat_path(session), json=body, headers=headers)
        self._note(answer)
        if answer.status_code == 200:
            texts += [f"{number}", answer.json()["choices"][0]["message"]["content"]]
            if self.draw.random() < 0.3:
                again = await self.client.post(chat_path(session), json=body, headers=headers)
                assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")

    async def _tokens(self, number: int) -> None:
        stub, draw = self.server.stub, self.draw
        if len(self.tokens) < 4 or draw.random() < 0.2:
            created = await stub.CreateSession(pb.CreateSessionRequest(token_ids=[number % 50, 1, 2]))
            self.tokens.append(self._known(created.session_id))
        session = draw.choice(self.tokens)
        turn = pb.TurnRequest(session_id=session, token_ids=[5, 6, number % 50], max_tokens=draw.randint(1, 6))
        turn.sampling.seed = number
        self.seen.append([event.token.token_id async for event in stub.Turn(turn) if event.HasField("token")])
        if draw.random() < 0.3:
            await stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=draw.randint(1, 3)))
        if draw.random() < 0.3:
            forked = await stub.ForkSession(pb.ForkSessionRequest(session_id=session))
            self.tokens.append(self._known(forked.session_id))

    async def look(self, session: str) -> None:
        self._note(await self.client.get(f"/sessions/{session}?branches=all"))

    async def all(self) -> None:
        """Everything there is to see, at both endpoints."""
        for session in self.talks:
            await self.look(session)
            await self.client.get(f"/sessions/{session}")
        for session in self.tokens:
            chunks = self.server.stub.GetHistory(pb.GetHistoryRequest(session_id=session))
            self.seen.append([(c.kind, list(c.token_ids), list(c.logprobs), c.stop_reason) async for c in chunks])
            info = await self.server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
            self.seen.append((info.history_length, info.rewind_count, info.sink))
        token, listed = "", []
        while True:
            page = (await self.client.get(f"/sessions?page_size=3&label=x&page_token={token}")).json()
            listed += [(self.ids.index(one["session_id"]), one["history_length"]) for one in page["data"]]
            if not (token := page["next_page_token"]):
                break
        self.seen.append(listed)

    def _known(self, session: str) -> str:
        if session not in self.ids:
            self.ids.append(session)
        return session

    def _note(self, answer: httpx.Response) -> None:
        """Without what is by chance, by the clock, or tells only what had to be computed."""
        text = answer.text
        for index, session in enumerate(self.ids):
            text = text.replace(session, f"session {index}")
        text = re.sub(r'"(state|timestamp|request_timestamp|created|created_at|idle_seconds|last_used_at|'
                      r'recomputed_tokens|prefilled_tokens|cached_tokens|kv_live_bytes|kv_reserved_bytes)'
                      r'": ?("[a-z]*"|null|[-0-9.e]+)', r'"\1":0', text)  # fmt: skip
        text = re.sub(r'"effort":\{[^}]*\}|chatcmpl-[0-9a-f]+|"links":\[[^]]*\]|"digest":"[0-9a-f]*"', "", text)
        self.seen.append((answer.status_code, text))


@contextlib.asynccontextmanager
async def driven(seed: int, drive: Drive | None = None, *, num_slabs: int, **options: Any) -> AsyncIterator[Drive]:
    engine = wordy_engine(forward_s=0.0, num_slabs=num_slabs)
    async with serving(engine, default_chat(), **options) as server, client_of(server) as client:
        drive = drive or Drive(server, client, random.Random(seed))
        drive.server, drive.client = server, client
        yield drive


@pytest.mark.parametrize("seed", range(examples(2)))
async def test_sessions_that_rest_all_the_time_are_told_apart_from_no_other(seed: int, tmp_path: Path) -> None:
    num_steps, few = 36, {"num_slabs": 2, "max_parked": 2}
    async with driven(seed, num_slabs=40, max_parked=1000) as calm:
        for number in range(num_steps):
            await calm.step(number)
        await calm.all()
    restless: Drive | None = None
    with fresh_database() if seed % 2 else contextlib.nullcontext("") as url:
        keeping = {"journal": url, "member": "one"} if url else {"data_dir": str(tmp_path)}
        for first in range(0, num_steps, 12):  # a restart after every 12 steps
            async with driven(seed, restless, **few, **keeping) as restless:
                for number in range(first, first + 12):
                    await restless.step(number)
                if first == num_steps - 12:
                    await restless.all()
                    assert restless.server.metrics.session_total.labels("loaded")._value.get() > 5
    assert restless is not None
    for mine, theirs in zip(restless.seen, calm.seen, strict=True):
        assert mine == theirs


async def test_many_who_talk_at_once_get_what_they_get_alone(tmp_path: Path) -> None:
    async def talk(client: httpx.AsyncClient, agent: int) -> list[str]:
        async def post(path: str, body: dict[str, Any]) -> Any:
            answer = await eventually(lambda: client.post(path, json=body), lambda answer: answer.status_code != 429)
            assert answer.status_code == 200, answer.text
            return answer.json()

        session = (await post("/sessions", {"history": "forest" if agent % 2 else "strict"}))["session_id"]
        texts: list[str] = []
        for number in range(4):
            texts.append(f"{agent} {number}")
            texts.append((await post(chat_path(session), said(*texts)))["choices"][0]["message"]["content"])
        return texts

    async with driven(0, num_slabs=20) as calm:
        alone = [await talk(calm.client, agent) for agent in range(6)]
    async with driven(0, num_slabs=2, max_parked=3, data_dir=str(tmp_path)) as busy:
        assert await asyncio.gather(*(talk(busy.client, agent) for agent in range(6))) == alone
        assert busy.server.metrics.session_total.labels("loaded")._value.get() > 0


# The runtime on a journal


class Journal(SqliteJournal):
    """Counts what is acquired, and fails the next write that has an entry of the type `fails_at`."""

    fails_at: type[Any] | None = None
    error: HoldfastError = JournalFailed("no")
    is_recorded = False  # all the same

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.acquired: list[str] = []

    async def acquire(self, session_id: str, owner: str) -> StoredSession:
        stored = await super().acquire(session_id, owner)
        self.acquired.append(session_id)
        return stored

    async def write(self, *entries: Entry) -> None:
        kind = Journal.fails_at
        is_failing = kind is not None and any(isinstance(entry, kind) for entry in entries)
        if is_failing:
            Journal.fails_at = None
        if not is_failing or Journal.is_recorded:
            await super().write(*entries)
        if is_failing:
            raise Journal.error


@contextlib.asynccontextmanager
async def resting(
    folder: Path, *, num_slabs: int = 2, max_parked: int = 0, **options: Any
) -> AsyncIterator[tuple[Runtime, Journal]]:
    engine = SlowEngine(num_slabs=num_slabs, forward_s=0.0)
    backend = EmbeddedBackend(Worker(engine), model_of(engine))
    journal, snapshots = Journal(folder), SnapshotStore(open_tier("", folder / "snapshots", budget_bytes=1 << 20))
    backend.start()
    try:
        yield Runtime(backend, journal=journal, snapshots=snapshots, max_parked=max_parked, **options), journal
    finally:
        await journal.close()
        backend.stop()


def in_memory(runtime: Runtime, session: str) -> bool:
    with contextlib.suppress(SessionNotFound):
        return bool(runtime.info(session, OWNER))
    return False


async def opened(runtime: Runtime, num: int) -> list[str]:
    return [(await runtime.create(OWNER, tokens=[number + 1, 2, 3])).session_id for number in range(num)]


async def turn(runtime: Runtime, session: str) -> int:
    """The length of the history after a turn."""
    async with runtime.using(session, OWNER):
        async for _ in runtime.generate(session, OWNER, GREEDY, tokens=[7]):
            pass
        return runtime.info(session, OWNER).history_length


async def test_a_session_is_read_once_however_many_ask_and_stays_while_it_is_used(tmp_path: Path) -> None:
    async with resting(tmp_path) as (runtime, journal):
        first, *others = await opened(runtime, 3)
        assert not in_memory(runtime, first)

        async def look() -> int:
            async with runtime.using(first, OWNER):
                return runtime.info(first, OWNER).history_length

        assert await asyncio.gather(*(look() for _ in range(50))) == [3] * 50
        assert journal.acquired == [first]
        async with runtime.using(first, OWNER):
            for session in others * 2:
                await turn(runtime, session)
            assert in_memory(runtime, first)
        assert journal.acquired.count(first) == 1


async def test_nobody_reads_a_session_of_another_owner_or_one_that_was_closed(tmp_path: Path) -> None:
    async with resting(tmp_path) as (runtime, _):
        sessions = await opened(runtime, 2)
        async with runtime.using(sessions[1], OWNER):
            await runtime.close(sessions[1], OWNER)
    async with resting(tmp_path) as (runtime, journal):
        asked = [(sessions[0], "bob", "unknown"), (sessions[1], "bob", "unknown"), (sessions[1], OWNER, "closed")]
        for session, owner, why in [*asked, *asked, ("none", OWNER, "unknown")]:
            with pytest.raises(SessionNotFound) as caught:
                async with runtime.using(session, owner):
                    pass
            assert caught.value.detail == why
        assert journal.acquired == []


async def test_a_flood_for_resting_sessions_keeps_to_the_room_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.sessions.capacity._PATIENCE_S", 0.05)
    async with resting(tmp_path, max_parked=4) as (runtime, _):
        sessions = await opened(runtime, 30)
        refused, most, may_end = 0, 0, asyncio.Event()

        async def use(session: str) -> None:
            nonlocal refused, most
            try:
                async with runtime.using(session, OWNER):
                    most = max(most, sum(in_memory(runtime, session) for session in sessions))
                    await may_end.wait()
            except CapacityExhausted:
                refused += 1

        users = [asyncio.create_task(use(session)) for session in sessions]
        await until(lambda: refused >= 24)
        may_end.set()
        await asyncio.gather(*users)
        assert most <= 6  # four that are parked, and two slabs
        assert [await turn(runtime, session) for session in sessions] == [8] * 30


async def test_what_rests_is_not_in_memory(tmp_path: Path) -> None:
    """Freed at once, without a collection."""
    trajectories = Trajectories()
    hooks: dict[str, Any] = {"on_loaded": trajectories.loaded, "on_removed": trajectories.forget}
    async with resting(tmp_path, max_parked=1, **hooks) as (runtime, _):
        chats = [(await runtime.create(OWNER, kind="forest")).session_id for _ in range(6)]
        seen: list[weakref.ref[Any]] = []
        gc.collect()
        gc.disable()
        try:
            for session in chats[:4]:
                async with runtime.using(session, OWNER):
                    trajectory = trajectories.get(session)
                    assert trajectory is not None
                    seen.append(weakref.ref(trajectory.tree))
                    del trajectory
            await until(lambda: sum(one() is not None for one in seen) <= 2)
        finally:
            gc.enable()


async def test_what_is_handed_over_is_at_rest_and_what_stays_busy_is_dropped(tmp_path: Path) -> None:
    async with resting(tmp_path, num_slabs=4) as (runtime, journal):
        idle, busy, late = await opened(runtime, 3)
        ending, staying = runtime.claim(busy, OWNER), runtime.claim(late, OWNER)
        handing = asyncio.create_task(runtime.hand_over(0.2))
        await until(lambda: not in_memory(runtime, idle))
        assert in_memory(runtime, busy)
        await ending.release()
        await handing
        with pytest.raises(Draining):
            staying.check_not_closed()
        staying.release_now()
        with pytest.raises(Draining):
            await turn(runtime, idle)
        listed = await journal.list_open(OWNER)
        assert [one.summary is not None for one in listed] == [True, True, False]
    async with resting(tmp_path) as (runtime, _):
        assert [await turn(runtime, session) for session in (idle, busy, late)] == [8, 8, 8]
        assert runtime.metrics.session_woken.labels("snapshot")._value.get() == 2


async def test_lists_show_what_rests_page_by_page(tmp_path: Path) -> None:
    async with resting(tmp_path) as (runtime, _):
        sessions = await opened(runtime, 9)
        for session in sessions[:5]:
            await turn(runtime, session)  # the last two never rested after it: they are read for the list
    async with resting(tmp_path) as (runtime, journal):
        await turn(runtime, sessions[8])
        lengths, after, num_pages = list[int](), 0, 0
        while True:
            page = await runtime.list_sessions(OWNER, after=after, size=2)
            lengths += [view.history_length for view in page.views]
            assert all(view.idle_s < 60 for view in page.views)
            num_pages += 1
            if not page.next_token:
                break
            after = int(page.next_token)
        assert (lengths, num_pages) == ([8] * 5 + [3] * 3 + [8], 5)
        assert journal.acquired == [sessions[8]]
        states = [len((await runtime.list_sessions(OWNER, wanted=Wanted(state=state))).views) for state in SessionState]
        assert dict(zip(SessionState, states, strict=True)) == {"live": 1, "parked": 8, "failed": 0}
        assert (await runtime.list_sessions("bob")).views == []


@pytest.mark.parametrize("has_journal", [True, False])
async def test_rows_tell_kind_turns_group_reward_and_times_and_are_found_by_text(
    tmp_path: Path, has_journal: bool
) -> None:
    options: dict[str, Any] = {"data_dir": str(tmp_path)} if has_journal else {"max_parked": 9}
    began = time.time()
    async with (
        serving(wordy_engine(forward_s=0, num_slabs=1), default_chat(), **options) as server,
        client_of(server) as client,
    ):
        ids = [
            await open_session(client, label="Über", group="rollouts 7"),
            await open_session(client, label="two", history="forest"),
            await create(server, [1, 2]),
        ]
        await events_of(generate(server, ids[2], max_tokens=2))
        await events_of(generate(server, ids[2], max_tokens=2))
        texts = ["hi"]
        for _ in range(2):
            reply = await client.post(chat_path(ids[0]), json=said(*texts))
            texts += [reply.json()["choices"][0]["message"]["content"], "and?"]
        await client.post(chat_path(ids[0]), json=said("hi", texts[1], "other"))
        await client.post(f"/sessions/{ids[0]}/reward", json={"reward": 0.5})
        await client.post(chat_path(ids[1]), json=said("hi"))
        await client.post("/v1/chat/completions", json=said("hi"))
        shown = [(await client.get(f"/sessions/{session}")).json() for session in ids[:2]]
        rows = (await client.get("/sessions")).json()["data"]
        if has_journal:
            assert server.metrics.session_total.labels("rested")._value.get() > 0
        assert [row["session_id"] for row in rows] == ids
        names = ("kind", "turns", "group", "reward", "label")
        assert [[row[name] for name in names] for row in rows] == [
            ["chat", 2, "rollouts 7", 0.5, "Über"],
            ["chat", 1, "", None, "two"],
            ["tokens", 2, "", None, ""],
        ]
        for row, one in zip(rows, shown, strict=False):
            for name in (*names, "created_at", "history_length"):
                assert row[name] == one[name], name
        for row in rows:
            assert began - 1 < row["created_at"] <= row["last_used_at"] + 0.1 < time.time() + 1
        for text, found in (("üBER", ids[:1]), ("LOUTS", ids[:1]), (ids[1][5:15].upper(), ids[1:2]), ("nobody", [])):
            listed = (await client.get("/sessions", params={"q": text})).json()
            assert ([row["session_id"] for row in listed["data"]], listed["next_page_token"]) == (found, "")
        page = (await client.get("/sessions", params={"q": "t", "page_size": 1, "label": "two"})).json()
        assert [row["session_id"] for row in page["data"]] == ids[1:2]


async def test_resting_sessions_expire_but_not_those_that_a_crash_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with resting(tmp_path) as (runtime, _):
        sessions = await opened(runtime, 5)
        await runtime.hand_over()
    async with resting(tmp_path, idle_ttl_s=60.0) as (runtime, _):
        now = time.time()
        monkeypatch.setattr(residence, "_now", lambda: now + 61)
        runtime._residence._started_at = now + 30
        async with runtime.using(sessions[0], OWNER):
            pass  # it is in memory, and counts from now
        await runtime._residence.expire(60.0)
        page = await runtime.list_sessions(OWNER)
        assert [view.session_id for view in page.views] == sessions  # this server has not been up for so long
        runtime._residence._started_at = now - 1
        await runtime._residence.expire(60.0)
        page = await runtime.list_sessions(OWNER)
        assert [view.session_id for view in page.views] == sessions[:1]
        with pytest.raises(SessionNotFound) as caught:
            await turn(runtime, sessions[1])
        assert caught.value.detail == "expired"


async def test_an_owner_gets_exactly_as_many_sessions_as_it_may_have_though_they_rest(tmp_path: Path) -> None:
    async with resting(tmp_path, num_slabs=9, quotas=OwnerQuotas(max_sessions=3)) as (runtime, _):
        made = await asyncio.gather(*(opened(runtime, 1) for _ in range(9)), return_exceptions=True)
        sessions = [one[0] for one in made if isinstance(one, list)]
        assert len(sessions) == 3
        assert sum(isinstance(one, QuotaExceeded) for one in made) == 6
    async with resting(tmp_path, quotas=OwnerQuotas(max_sessions=3)) as (runtime, _):
        with pytest.raises(QuotaExceeded):
            await opened(runtime, 1)
        async with runtime.using(sessions[0], OWNER):
            await runtime.close(sessions[0], OWNER)
        await opened(runtime, 1)


# A journal that is not sure, or has given the session to another


ERRORS = [RecordUncertain("who knows"), SessionElsewhere("x", "other"), Fenced("fenced")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_session_whose_record_is_in_doubt_is_read_again(
    error: HoldfastError, is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SqliteJournal", Journal)

    def fail(kind: type[Any]) -> None:
        Journal.fails_at, Journal.error, Journal.is_recorded = kind, error, is_recorded

    engine = wordy_engine(num_slabs=2, forward_s=0.0)
    async with serving(engine, default_chat(), data_dir=str(tmp_path)) as server, client_of(server) as client:
        for history in ("strict", "forest"):
            session = await open_session(client, history=history)
            reply = (await client.post(chat_path(session), json=said("a"))).json()["choices"][0]["message"]["content"]
            body, key = said("a", reply, "b"), {"idempotency-key": "k"}
            fail(TurnRecorded)
            failed = await client.post(chat_path(session), json=body, headers=key)
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
            assert refusal_of(failed)[1] in ("journal_failed", "fenced")
            shown = (await client.get(f"/sessions/{session}")).json()
            assert (shown["turns"], shown["state"]) == (1 + is_recorded, "parked")
            again = await client.post(chat_path(session), json=body, headers=key)
            assert again.status_code == 200
            assert ("idempotent-replayed" in again.headers) is is_recorded
            assert (await client.get(f"/sessions/{session}")).json()["turns"] == 2
            fail(Rewarded)
            assert (await client.post(f"/sessions/{session}/reward", json={"reward": 1})).status_code == 503
            assert (await client.get(f"/sessions/{session}")).json()["reward"] == (1.0 if is_recorded else None)
        tokens = (await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[1, 2, 3]))).session_id
        asked = pb.TurnRequest(session_id=tokens, token_ids=[5], max_tokens=4)
        fail(TokensSampled)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [event async for event in server.stub.Turn(asked)]
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        info = await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=tokens))
        assert info.history_length == (8 if is_recorded else 3)
        assert len([event async for event in server.stub.Turn(asked)]) == 5
        assert server.metrics.session_total.labels("dropped")._value.get() == 5
        await until(lambda: server.worker.num_free_slabs == 1)  # those that were dropped hold none


async def test_a_session_that_could_not_be_closed_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SqliteJournal", Journal)
    engine = wordy_engine(num_slabs=2, forward_s=0.0)
    async with serving(engine, default_chat(), data_dir=str(tmp_path)) as server, client_of(server) as client:
        session = await open_session(client)
        Journal.fails_at, Journal.error, Journal.is_recorded = SessionClosed, JournalFailed("no"), False
        assert (await client.delete(f"/sessions/{session}")).status_code == 503
        assert (await client.post(chat_path(session), json=said("a"))).status_code == 200
        assert (await client.delete(f"/sessions/{session}")).status_code == 204
        assert refusal_of(await client.get(f"/sessions/{session}")) == (404, "session_not_found")


async def test_a_session_that_lacks_a_turn_is_failed_not_altered_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server, client_of(server) as client:
        session = await open_session(client, history="forest")
        for text in ("one", "two", "three"):
            assert (await client.post(chat_path(session), json=said(text, max_tokens=2))).status_code == 200
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        database.execute("DELETE FROM turns WHERE number = 2")
        database.commit()
    async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server, client_of(server) as client:
        shown = (await client.get(f"/sessions/{session}")).json()
        again = await client.post(chat_path(session), json=said("four", max_tokens=2))
    assert (shown["state"], shown["turns"]) == ("failed", 1)
    assert "session_failed" in again.text
    assert f"session {session}: turn 2 is not on record; the 1 turns before it are intact" in caplog.text
