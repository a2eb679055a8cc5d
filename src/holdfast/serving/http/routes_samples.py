"""What a trainer fetches: a session's samples, in the format it reads."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from holdfast.chats.samples.formats import CONTENT_TYPES, encode, read_format
from holdfast.chats.samples.options import Options
from holdfast.chats.service import ChatService
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.schema import SamplesRequest
from holdfast.serving.http.schema import decode as decode_body


class SampleRoutes:
    def __init__(self, chats: ChatService) -> None:
        self._chats = chats

    async def samples(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        self._chats.view(session_id, owner)
        body = decode_body(await request.body(), SamplesRequest, may_be_empty=True)
        options = Options(
            branch=body.branch,
            max_seq_len=body.max_seq_len,
            min_weight_version=body.min_weight_version,
            metadata=body.metadata or {},
        )
        form = read_format(body.format)
        export = self._chats.samples(session_id, owner, options)
        content = await asyncio.to_thread(lambda: encode(export(), form))
        return Response(content, media_type=CONTENT_TYPES[form])
