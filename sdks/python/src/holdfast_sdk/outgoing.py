"""An exported session on its way back to a server."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from holdfast_sdk.gen import runtime_pb2 as pb


class Outgoing:
    """Chunks of bytes as messages. gRPC logs an error of their source and drops it, so `failure` keeps it."""

    def __init__(self, chunks: Iterable[bytes] | AsyncIterable[bytes]) -> None:
        self._chunks = chunks
        self.failure: Exception | None = None

    def messages(self) -> Iterator[pb.SessionChunk] | AsyncIterator[pb.SessionChunk]:
        return self._later() if isinstance(self._chunks, AsyncIterable) else self._now()

    def _now(self) -> Iterator[pb.SessionChunk]:
        assert isinstance(self._chunks, Iterable)
        try:
            for chunk in self._chunks:
                yield pb.SessionChunk(data=chunk)
        except Exception as error:
            self.failure = error
            raise

    async def _later(self) -> AsyncIterator[pb.SessionChunk]:
        assert isinstance(self._chunks, AsyncIterable)
        try:
            async for chunk in self._chunks:
                yield pb.SessionChunk(data=chunk)
        except Exception as error:
            self.failure = error
            raise
