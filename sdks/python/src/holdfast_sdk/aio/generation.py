"""A generation as it arrives, for asyncio."""

from collections.abc import AsyncIterator
from types import TracebackType

from holdfast_sdk.aio.wire import AsyncStream
from holdfast_sdk.errors import HoldfastError
from holdfast_sdk.generation import GenerationRecord
from holdfast_sdk.results import Token
from holdfast_sdk.session_flows import SessionFlows


class AsyncGeneration(GenerationRecord):
    """Sampled tokens, one by one. Leaving the `async for` loop or the `async with` block early cancels the generation,
    and so does dropping the object; the tokens that were streamed stay in the session's history."""

    def __init__(self, stream: AsyncStream, session: SessionFlows, *, is_turn: bool = False) -> None:
        super().__init__(session, is_turn=is_turn)
        self._stream = stream
        self._ready: list[Token] = []  # have arrived and were not read, the next one last

    def __aiter__(self) -> AsyncIterator[Token]:
        """What is still to come; raises Cancelled where it was cancelled."""
        return _Reading(self)

    async def _next(self) -> Token | None:
        """The next token; None at the end. Whatever ends the reading ends the call, the task's cancellation too."""
        token = self._ready.pop() if self._ready and self._is_open else None
        if token is not None:
            return token
        try:
            async for event in self._stream:
                if tokens := self._take(event):
                    token, *self._ready = tokens
                    self._ready.reverse()
                    break
            else:
                self._check_end()
        except HoldfastError as error:
            if self._is_failure(error):
                raise
        finally:
            if token is None:
                self.cancel()
        return token

    def cancel(self) -> None:
        """Stop at the next step; nothing happens where it has ended. May be called from another task."""
        if self._close():
            self._stream.close()

    async def __aenter__(self) -> "AsyncGeneration":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class _Reading(AsyncIterator[Token]):
    """One pass of `async for`. Python drops it at once when the loop is left, for whatever reason: that cancels."""

    def __init__(self, generation: AsyncGeneration) -> None:
        self._generation = generation

    async def __anext__(self) -> Token:
        token = await self._generation._next()
        if token is None:
            raise StopAsyncIteration
        return token

    def __del__(self) -> None:
        self._generation.cancel()
