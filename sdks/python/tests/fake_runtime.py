"""A small server that speaks the whole proto as wire.md says, over a model without weights.

It passes the conformance scenarios (test_scenarios.py), so the tests here lean on the contract, not on a mock.
"""

import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from fake_model import EOS, VOCABULARY_SIZE, is_valid, spelled
from fake_sampling import sample
from fake_session import MAX_PIN, RECENT, SINK, FakeSession, session_info
from faults import refuse
from holdfast_sdk.gen import runtime_pb2 as pb
from holdfast_sdk.gen.runtime_pb2_grpc import RuntimeServiceServicer

FINGERPRINT = "fake-fingerprint"
Status = grpc.StatusCode
Context = Any


class FakeRuntime(RuntimeServiceServicer):
    def __init__(self) -> None:
        self.sessions: dict[str, FakeSession] = {}
        self.closed: set[str] = set()
        self.exports: list[FakeSession] = []
        self.left = threading.Semaphore(0)  # released for every generation that a client left
        self.finished = threading.Semaphore(0)  # and for every one that came to its end
        self._numbers = itertools.count(1)

    async def CreateSession(self, request: Any, context: Context) -> pb.CreateSessionResponse:
        pin = request.pin_tokens if request.HasField("pin_tokens") else SINK
        if not 0 <= pin <= MAX_PIN:
            await _invalid(context, f"pin_tokens must be 0 to {MAX_PIN}, got {pin}")
        await _check_ids(context, request.token_ids)
        session = self._new(request.client_label, pin, tuple(request.eos_token_ids) or (EOS,), dict(request.metadata))
        session.give(list(request.token_ids))
        return pb.CreateSessionResponse(
            session_id=session.id,
            sink=pin,
            recent=RECENT,
            kv_reserved_bytes=1024,
            model_fingerprint=FINGERPRINT,
            history_length=len(session.tokens),
        )

    async def GetModelInfo(self, request: Any, context: Context) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            name="fake",
            fingerprint=FINGERPRINT,
            vocabulary_size=VOCABULARY_SIZE,
            eos_token_ids=[EOS],
            tokenizer_hash="t",
            chat_template_hash="c",
            sink=SINK,
            recent=RECENT,
            max_pin_tokens=MAX_PIN,
            context_length=8192,
        )

    async def GetCluster(self, request: Any, context: Context) -> pb.GetClusterResponse:
        facts: dict[str, Any] = {"state": "serving", "epoch": 2, "sessions": len(self.sessions), "room": 3}
        here = pb.ClusterMember(name="a", lease_left_seconds=7.5, version="1", http="h:1", grpc="g:1", **facts)
        return pb.GetClusterResponse(members=[here, pb.ClusterMember(name="b")], this_member="a", is_cluster=True)

    async def AppendTokens(self, request: Any, context: Context) -> pb.AppendTokensResponse:
        session = await self._idle(request, context)
        await _check_ids(context, request.token_ids)
        session.give(list(request.token_ids))
        return pb.AppendTokensResponse(
            history_length=len(session.tokens), prefilled_tokens=len(request.token_ids), prefill_duration_seconds=0.25
        )

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        session = await self._idle(request, context)
        async for event in self._sample(session, request, context):
            yield event

    async def Turn(self, request: Any, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        session = await self._idle(request, context)
        await _check_ids(context, request.token_ids)
        if not is_valid(request.max_tokens, request.sampling):
            await _invalid(context, "out of range")
        session.give(list(request.token_ids))
        async for event in self._sample(session, request, context):
            yield event

    async def _sample(self, session: FakeSession, request: Any, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        if not session.tokens:
            await _invalid(context, "there is nothing to continue: the history is empty")
        if not is_valid(request.max_tokens, request.sampling):
            await _invalid(context, "out of range")
        async for event in sample(session, request, self.left.release):
            yield event
        self.finished.release()

    async def ForkSession(self, request: Any, context: Context) -> pb.ForkSessionResponse:
        source = await self._idle(request, context)
        length = request.at_position if request.HasField("at_position") else len(source.tokens)
        if not 0 <= length <= len(source.tokens):
            await _invalid(context, "no such position")
        fork = source.fork(f"s{next(self._numbers)}", request.client_label, length)
        self.sessions[fork.id] = fork
        return pb.ForkSessionResponse(session_id=fork.id, history_length=length)

    async def RewindSession(self, request: Any, context: Context) -> pb.RewindSessionResponse:
        session = await self._idle(request, context)
        if not 0 <= request.to_position <= len(session.tokens):
            await _invalid(context, "no such position")
        session.cut(request.to_position)
        session.num_rewinds += 1
        return pb.RewindSessionResponse(history_length=len(session.tokens), recomputed_tokens=0)

    async def GetSessionInfo(self, request: Any, context: Context) -> pb.SessionInfo:
        session = await self._get(request, context)
        info = session_info(session)
        session.lingering = max(0, session.lingering - 1)
        return info

    async def ListSessions(self, request: Any, context: Context) -> pb.ListSessionsResponse:
        found = [
            session
            for session in self.sessions.values()
            if not request.HasField("client_label") or session.label == request.client_label
            if not request.HasField("state") or request.state == pb.SESSION_STATE_LIVE
        ]
        start = int(request.page_token or 0)
        end = start + request.page_size
        token = str(end) if end < len(found) else ""
        return pb.ListSessionsResponse(sessions=map(session_info, found[start:end]), next_page_token=token)

    async def GetHistory(self, request: Any, context: Context) -> AsyncIterator[pb.HistoryChunk]:
        session = await self._get(request, context)
        start = request.from_position if request.HasField("from_position") else 0
        end = request.to_position if request.HasField("to_position") else len(session.tokens)
        for span in session.spans:
            tokens = [token for i, token in enumerate(span.tokens, span.start) if start <= i < end]
            if tokens:
                sampled = tokens if span.kind == pb.SPAN_KIND_SAMPLED else []
                yield pb.HistoryChunk(
                    from_position=max(start, span.start),
                    kind=span.kind,
                    token_ids=[token.token_id for token in tokens],
                    logprobs=[token.logprob for token in sampled],
                    sampling_logprobs=[token.sampling_logprob for token in sampled],
                    stop_reason=span.stop_reason,
                )

    async def SearchHistory(self, request: Any, context: Context) -> pb.SearchHistoryResponse:
        """A passage is all that a span spells. It is found by any word that has more than three letters."""
        session = await self._get(request, context)
        query = request.query or spelled(request.query_token_ids)
        if not query or not 0 <= request.limit <= 64:
            await _invalid(context, "query must not be empty, and limit must be 1 to 64")
        words = [word for word in query.lower().strip("?").split() if len(word) > 3]
        found = []
        for span in session.spans:
            at = [i for i, token in enumerate(span.tokens, span.start) if spelled([token.token_id]).strip()]
            text = spelled([token.token_id for token in span.tokens]).strip()
            is_out = at and at[0] >= session.sink and at[-1] < len(session.tokens) - RECENT
            if any(word in text for word in words) and (is_out or request.include_in_view):
                place = {"from_position": at[0], "to_position": at[-1] + 1}
                found.append(pb.Passage(turn=1, role="given", text=text, score=1.0, **place))
        return pb.SearchHistoryResponse(passages=found)

    async def ExportSession(self, request: Any, context: Context) -> AsyncIterator[pb.SessionChunk]:
        session = await self._idle(request, context)
        self.exports.append(session.fork("", session.label, len(session.tokens)))
        yield pb.SessionChunk(data=bytes([request.without_snapshot]))
        yield pb.SessionChunk(data=len(self.exports).to_bytes(4, "big"))
        yield pb.SessionChunk(data=b"END")

    async def ImportSession(self, chunks: AsyncIterator[pb.SessionChunk], context: Context) -> pb.ImportSessionResponse:
        data = b"".join([chunk.data async for chunk in chunks])
        if not data.endswith(b"END"):
            reason = "truncated" if data[:1] in (b"", b"\0", b"\1") else "not_a_file"
            await refuse(context, Status.INVALID_ARGUMENT, "invalid_argument", details={"reason": reason})
        source = self.exports[int.from_bytes(data[1:5], "big") - 1]
        length = len(source.tokens)
        session = source.fork(f"s{next(self._numbers)}", source.label, length)
        self.sessions[session.id] = session
        recomputed = length if data[0] else 0
        return pb.ImportSessionResponse(
            session_id=session.id,
            reused_tokens=length - recomputed,
            recomputed_tokens=recomputed,
            history_length=length,
        )

    async def CloseSession(self, request: Any, context: Context) -> pb.CloseSessionResponse:
        session = await self._get(request, context)
        del self.sessions[session.id]
        self.closed.add(session.id)
        return pb.CloseSessionResponse(final_history_length=len(session.tokens))

    def _new(self, label: str, sink: int, eos: tuple[int, ...], metadata: dict[str, str]) -> FakeSession:
        session = FakeSession(f"s{next(self._numbers)}", label, sink, eos, metadata)
        self.sessions[session.id] = session
        return session

    async def _get(self, request: Any, context: Context) -> FakeSession:
        if session := self.sessions.get(request.session_id):
            return session
        detail = "closed" if request.session_id in self.closed else "unknown"
        return await refuse(context, Status.NOT_FOUND, "session_not_found", details={"detail": detail})

    async def _idle(self, request: Any, context: Context) -> FakeSession:
        """The session, where it is free and as long as the client thinks."""
        session = await self._get(request, context)
        if session.is_busy:
            await refuse(context, Status.ABORTED, "session_busy")
        length = str(len(session.tokens))
        expects = "expected_history_length" in request.DESCRIPTOR.fields_by_name
        if expects and request.HasField("expected_history_length") and str(request.expected_history_length) != length:
            await refuse(context, Status.ABORTED, "history_conflict", details={"history_length": length})
        return session


async def _check_ids(context: Context, ids: list[int]) -> None:
    if not all(0 <= token < VOCABULARY_SIZE for token in ids):
        await _invalid(context, f"a token id is outside the vocabulary of {VOCABULARY_SIZE}")


async def _invalid(context: Context, message: str) -> NoReturn:
    await refuse(context, Status.INVALID_ARGUMENT, "invalid_argument", message=message)
