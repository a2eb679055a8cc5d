"""Sessions out of one server and into another, over either door."""

from typing import Any

import httpx

from holdfast.serving.grpc.gen import runtime_pb2 as pb
from tests.serving import Server


async def exported(server: Server, session: str, **fields: Any) -> bytes:
    call = server.stub.ExportSession(pb.ExportSessionRequest(session_id=session, **fields))
    return b"".join([chunk.data async for chunk in call])


async def imported(server: Server, data: bytes, size: int = 1000) -> pb.ImportSessionResponse:
    chunks = [pb.SessionChunk(data=data[at : at + size]) for at in range(0, len(data), size)]
    answer: pb.ImportSessionResponse = await server.stub.ImportSession(iter(chunks))
    return answer


async def downloaded(client: httpx.AsyncClient, session: str, **query: str) -> bytes:
    response = await client.get(f"/sessions/{session}/export", params=query)
    assert response.status_code == 200, response.text
    assert int(response.headers["content-length"]) == len(response.content)
    return response.content


async def uploaded(client: httpx.AsyncClient, data: bytes) -> dict[str, Any]:
    response = await client.post("/sessions/import", content=data)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def turn(session: str, seed: int, **fields: Any) -> pb.TurnRequest:
    sampling = pb.SamplingOptions(seed=seed, temperature=0.8 if seed else 0)
    return pb.TurnRequest(
        **{"session_id": session, "token_ids": [seed, 2], "max_tokens": 9, "sampling": sampling} | fields
    )


async def told(call: Any) -> list[tuple[int, float]]:
    """Tokens and logprobs of a generation."""
    return [(event.token.token_id, event.token.logprob) async for event in call if event.HasField("token")]


async def history_of(server: Server, session: str) -> list[tuple[Any, ...]]:
    chunks = server.stub.GetHistory(pb.GetHistoryRequest(session_id=session))
    return [
        (chunk.kind, list(chunk.token_ids), list(chunk.logprobs), list(chunk.sampling_logprobs), chunk.stop_reason)
        async for chunk in chunks
    ]


async def length_of(server: Server, session: str) -> int:
    return int((await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))).history_length)
