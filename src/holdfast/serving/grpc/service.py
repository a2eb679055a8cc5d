"""RuntimeService: one method for each RPC, which converts the request and calls the runtime."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from holdfast.errors import InvalidArgument, PayloadTooLarge, Unimplemented
from holdfast.generation import Done
from holdfast.serving.cluster.membership import Describe
from holdfast.serving.grpc import convert
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.grpc.interceptor import current_owner
from holdfast.serving.keys import is_admin
from holdfast.sessions.admission import Admission
from holdfast.sessions.limits import check_ids, check_label, check_metadata
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.session_file import pieces
from holdfast.sessions.transfers import Transfers
from holdfast.sessions.view import Search, Wanted, checked_page_size, page_start

Context = Any  # grpc.aio.ServicerContext; errors are raised, never set on it

_PAGE = 100
_RESULTS = 8
_MB = 1024 * 1024


class RuntimeService(rpc.RuntimeServiceServicer):
    """Owners come from the interceptor; errors are raised and translated there."""

    def __init__(
        self,
        runtime: Runtime,
        transfers: Transfers | None = None,
        admission: Admission | None = None,
        *,
        max_session_mb: int = 1024,
        describe: Describe | None = None,
        search: Search | None = None,
    ) -> None:
        self._runtime = runtime
        self._admission = admission or Admission(runtime.capacity, max_queue=0, max_wait_s=0, metrics=runtime.metrics)
        self._transfers = transfers or Transfers(runtime)
        self._max_session_mb = max_session_mb
        self._describe = describe
        self._search = search

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        check_label("client_label", request.client_label)
        check_ids("eos_token_ids", request.eos_token_ids)
        check_metadata("metadata", request.metadata)
        view = await self._runtime.create(
            current_owner.get(),
            label=request.client_label,
            eos_token_ids=request.eos_token_ids,
            tokens=list(request.token_ids),
            pin_tokens=request.pin_tokens if request.HasField("pin_tokens") else None,
            metadata=request.metadata,
        )
        return pb.CreateSessionResponse(
            session_id=view.session_id,
            sink=view.sink,
            recent=view.recent,
            kv_reserved_bytes=view.kv_reserved_bytes,
            model_fingerprint=self._runtime.model.fingerprint,
            history_length=view.history_length,
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return convert.model_info(self._runtime.model)

    async def AppendTokens(self, request: pb.AppendTokensRequest, context: Context) -> pb.AppendTokensResponse:
        owner, expected = current_owner.get(), _optional(request, "expected_history_length")
        if not request.token_ids:
            raise InvalidArgument("append needs at least one token")
        async with (
            self._runtime.claim(request.session_id, owner, kind="tokens", expected_length=expected) as claim,
            self._admission.admitted(owner=owner),
        ):
            done = await claim.append(list(request.token_ids))
        return pb.AppendTokensResponse(
            history_length=done.history_length,
            prefilled_tokens=done.prefill_tokens,
            prefill_duration_seconds=done.prefill_duration_s,
        )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        async for event in self._generate(request, []):
            yield event

    async def Turn(self, request: pb.TurnRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        if not request.token_ids:
            raise InvalidArgument(
                "token_ids: a turn needs at least one token; use Generate to sample without new tokens"
            )
        async for event in self._generate(request, list(request.token_ids)):
            yield event

    async def _generate(
        self, request: pb.GenerateRequest | pb.TurnRequest, tokens: list[int]
    ) -> AsyncIterator[pb.GenerateEvent]:
        owner, session_id = current_owner.get(), request.session_id
        eos = self._runtime.find(session_id, owner).eos_token_ids
        params = convert.sampling_params(request.sampling, request.max_tokens, eos)
        expected = _optional(request, "expected_history_length")
        done: list[Done] = []
        async with (
            self._runtime.claim(session_id, owner, kind="tokens", expected_length=expected) as claim,
            self._admission.admitted(owner=owner),
            contextlib.aclosing(claim.generate(params, tokens)) as batches,
        ):
            async for batch in batches:
                done = [value for value in batch if isinstance(value, Done)]
                for event in convert.events(batch[: -len(done) or None], batch_tokens=request.batch_tokens):
                    yield event
        for event in convert.events(done, batch_tokens=False):
            yield event  # only now is the session free: a client that gets this may go on at once

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.ForkSessionResponse:
        check_label("client_label", request.client_label)
        view, recomputed = await self._runtime.fork(
            request.session_id,
            current_owner.get(),
            at_position=_optional(request, "at_position"),
            label=request.client_label,
        )
        return pb.ForkSessionResponse(
            session_id=view.session_id, history_length=view.history_length, recomputed_tokens=recomputed
        )

    async def RewindSession(self, request: pb.RewindSessionRequest, context: Context) -> pb.RewindSessionResponse:
        rewound = await self._runtime.rewind(request.session_id, current_owner.get(), request.to_position)
        return pb.RewindSessionResponse(
            history_length=rewound.history_length, recomputed_tokens=rewound.recomputed_tokens
        )

    async def GetSessionInfo(self, request: pb.GetSessionInfoRequest, context: Context) -> pb.SessionInfo:
        return convert.session_info(self._runtime.info(request.session_id, current_owner.get()))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        page = await self._runtime.list_sessions(
            current_owner.get(),
            wanted=Wanted(
                request.client_label if request.HasField("client_label") else None, convert.state_filter(request)
            ),
            after=page_start(request.page_token),
            size=checked_page_size(request.page_size or _PAGE),
        )
        return pb.ListSessionsResponse(
            sessions=[convert.session_info(view) for view in page.views], next_page_token=page.next_token
        )

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Context) -> AsyncIterator[pb.HistoryChunk]:
        pieces = self._runtime.history(
            request.session_id,
            current_owner.get(),
            _optional(request, "from_position") or 0,
            _optional(request, "to_position"),
        )
        for piece in pieces:
            yield convert.history_chunk(piece)

    async def SearchHistory(self, request: pb.SearchHistoryRequest, context: Context) -> pb.SearchHistoryResponse:
        if self._search is None:
            raise Unimplemented("this server has no tokenizer for its model, which searching needs")
        if bool(request.query) == bool(request.query_token_ids):
            raise InvalidArgument("give query or query_token_ids, and not both")
        found = await self._search(
            request.session_id,
            current_owner.get(),
            request.query or list(request.query_token_ids),
            limit=request.limit or _RESULTS,
            in_view=request.include_in_view,
        )
        return pb.SearchHistoryResponse(passages=map(convert.passage, found))

    async def ExportSession(self, request: pb.ExportSessionRequest, context: Context) -> AsyncIterator[pb.SessionChunk]:
        owner = current_owner.get()
        parts = await self._transfers.export(
            request.session_id, owner, with_snapshot=not request.without_snapshot, is_admin=is_admin(owner)
        )
        for piece in pieces(parts):
            yield pb.SessionChunk(data=piece)

    async def ImportSession(
        self, request_iterator: AsyncIterator[pb.SessionChunk], context: Context
    ) -> pb.ImportSessionResponse:
        async def chunks() -> AsyncIterator[bytes]:
            num_bytes = 0
            async for chunk in request_iterator:
                num_bytes += len(chunk.data)
                if num_bytes > self._max_session_mb * _MB:
                    limit = f"{self._max_session_mb} MB (--max-session-mb)"
                    raise PayloadTooLarge(f"the session file is larger than {limit}")
                yield chunk.data

        imported = await self._transfers.import_file(current_owner.get(), chunks())
        return pb.ImportSessionResponse(
            session_id=imported.session_id,
            reused_tokens=imported.reused_tokens,
            recomputed_tokens=imported.recomputed_tokens,
            history_length=imported.history_length,
        )

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        length = await self._runtime.close(request.session_id, current_owner.get())
        return pb.CloseSessionResponse(final_history_length=length)

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.GetClusterResponse:
        if self._describe is None:
            raise Unimplemented("this server does not know its cluster")
        return convert.cluster(await self._describe())


def _optional(request: Any, field: str) -> int | None:
    return getattr(request, field) if request.HasField(field) else None
