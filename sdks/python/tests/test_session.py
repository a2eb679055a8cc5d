"""The calls of a session and of a client that do not generate: what is sent, what comes back."""

from typing import Any

import grpc
import pytest

from both import every, settled
from conftest import Connect
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import (
    AsyncSession,
    Closed,
    Created,
    Forked,
    HistoryChunk,
    Imported,
    ModelInfo,
    Rewound,
    Session,
    SessionState,
    SpanKind,
    SpansSummary,
    StopReason,
    errors,
)
from holdfast_sdk.convert import _named


async def test_a_session_knows_what_the_server_said(client: Any) -> None:
    session = await settled(
        client.create_session(
            label="mine", token_ids=iter([1, 2]), pin_tokens=8, eos_token_ids=(7, 8), metadata={"run": "1"}
        )
    )
    assert isinstance(session, Session | AsyncSession)
    assert session.origin == Created(
        session_id=session.id,
        sink=8,
        recent=64,
        kv_reserved_bytes=1024,
        model_fingerprint="fake-fingerprint",
        history_length=2,
    )
    assert session.history_length == 2
    assert repr(session) == f"{type(session).__name__}({session.id!r})"
    info = await settled(session.info())
    assert (info.label, info.metadata, info.sink, info.state) == ("mine", {"run": "1"}, 8, SessionState.LIVE)
    assert info.spans == SpansSummary(given_spans=1, given_tokens=2, sampled_spans=0, sampled_tokens=0)


async def test_what_the_server_does_not_say_is_none(session: Any) -> None:
    info = await settled(session.info())
    assert (info.kv_live_bytes, info.kv_reserved_bytes, info.failure) == (512, None, None)


async def test_model_info(client: Any) -> None:
    assert await settled(client.model_info()) == ModelInfo(
        name="fake",
        fingerprint="fake-fingerprint",
        vocabulary_size=49152,
        eos_token_ids=(2,),
        tokenizer_hash="t",
        chat_template_hash="c",
        sink=4,
        recent=64,
        max_pin_tokens=16,
        context_length=8192,
    )


async def test_fork_and_rewind(session: Any) -> None:
    fork = await settled(session.fork(2, label="child"))
    assert fork.origin == Forked(session_id=fork.id, history_length=2, recomputed_tokens=0)
    assert fork.history_length == 2
    assert (await settled(fork.append([5]))).history_length == 3
    assert (await settled(fork.info())).label == "child"
    assert await settled(session.rewind(1)) == Rewound(history_length=1, recomputed_tokens=0)
    assert (await settled(session.append([5]))).history_length == 2


async def test_history_comes_in_chunks(session: Any) -> None:
    generation = await settled(session.generate(max_tokens=2, logit_bias={2: -100}))
    tokens = await every(generation)
    given, sampled = await every(session.history())
    assert given == HistoryChunk(
        start=0,
        kind=SpanKind.GIVEN,
        token_ids=(1, 9690, 198),
        logprobs=(),
        sampling_logprobs=(),
        stop_reason=StopReason.UNSPECIFIED,
    )
    assert (sampled.start, sampled.end, sampled.kind) == (3, 5, SpanKind.SAMPLED)
    assert sampled.token_ids == tuple(token.id for token in tokens)
    assert sampled.logprobs == tuple(token.logprob for token in tokens)
    assert sampled.stop_reason == StopReason.MAX_TOKENS
    assert [chunk.token_ids for chunk in await every(session.history(1, 4))] == [(9690, 198), sampled.token_ids[:1]]


async def test_export_and_import(client: Any, session: Any) -> None:
    chunks = await every(session.export())
    assert all(isinstance(chunk, bytes) for chunk in chunks)
    copy = await settled(client.import_session(chunks))
    assert copy.origin == Imported(session_id=copy.id, reused_tokens=3, recomputed_tokens=0, history_length=3)
    assert copy.history_length == 3
    assert [chunk.token_ids for chunk in await every(copy.history())] == [(1, 9690, 198)]
    other = await settled(client.import_session(session.export(with_snapshot=False), timeout_s=9))
    assert (other.origin.reused_tokens, other.origin.recomputed_tokens) == (0, 3)
    assert (await settled(other.append([5]))).history_length == 4
    assert (await settled(copy.info())).history_length == 3


async def test_a_file_that_is_refused_says_why(client: Any, session: Any) -> None:
    chunks = await every(session.export())
    with pytest.raises(errors.InvalidArgument) as caught:
        await settled(client.import_session(chunks[:-1]))
    assert caught.value.details["reason"] == "truncated"


async def test_an_error_of_the_imported_file_is_told_as_it_is(client: Any) -> None:
    def chunks() -> Any:
        yield b"1234"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        await settled(client.import_session(chunks()))


async def test_close_and_what_comes_after(session: Any) -> None:
    assert await settled(session.close()) == Closed(final_history_length=3)
    with pytest.raises(errors.SessionNotFound) as caught:
        await settled(session.info())
    assert caught.value.details == {"detail": "closed"}


async def use(session: Any, error: BaseException | None = None, *, close: bool = False) -> None:
    """A `with` block around the session, which raises or closes inside."""
    if isinstance(session, Session):
        with session:
            if close:
                session.close()
            if error:
                raise error
    else:
        async with session:
            if close:
                await session.close()
            if error:
                raise error


async def test_a_block_closes_its_session_once(session: Any, server: FakeServer) -> None:
    await use(session, close=True)
    assert server.faults.calls.count("CloseSession") == 1


async def test_a_block_ends_well_where_the_session_is_gone(client: Any, session: Any, server: FakeServer) -> None:
    await settled(client.session(session.id).close())
    await use(session)
    assert server.faults.calls.count("CloseSession") == 2


async def test_the_error_of_the_block_is_not_hidden_by_the_close(session: Any, server: FakeServer) -> None:
    server.faults.plan("CloseSession", Fault(status=grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(KeyError):
        await use(session, KeyError("mine"))


async def test_a_close_that_fails_is_told(session: Any, server: FakeServer) -> None:
    server.faults.plan("CloseSession", Fault(status=grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(errors.ConnectionFailed):
        await use(session)


async def test_all_pages_are_read(client: Any, server: FakeServer) -> None:
    ids = [(await settled(client.create_session(label="even" if i % 2 == 0 else "odd"))).id for i in range(7)]
    found = await every(client.list_sessions(page_size=3))
    assert [info.session_id for info in found] == ids
    assert server.faults.calls.count("ListSessions") == 3
    assert [info.session_id for info in await every(client.list_sessions(label="odd"))] == ids[1::2]
    assert len(await every(client.list_sessions(state=SessionState.LIVE))) == 7
    assert await every(client.list_sessions(state=SessionState.PARKED)) == []
    assert await every(client.list_sessions(label="")) == []


async def test_a_page_is_fetched_only_when_it_is_needed(client: Any, server: FakeServer) -> None:
    for _ in range(3):
        await settled(client.create_session())
    sessions = client.list_sessions(page_size=1)
    first = await anext(sessions) if hasattr(sessions, "__anext__") else next(sessions)
    assert first.session_id
    assert server.faults.calls.count("ListSessions") == 1


async def test_a_client_works_as_a_block(connect: Connect) -> None:
    client = connect()
    if hasattr(client, "__aenter__"):
        async with client as same:
            assert same is client
            await client.model_info()
    else:
        with client as same:
            assert same is client
            client.model_info()


def test_a_value_of_a_newer_server_is_unspecified() -> None:
    assert _named(StopReason, 99) is StopReason.UNSPECIFIED
