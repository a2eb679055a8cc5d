"""One session of token ids for `holdfast chat`: of a runtime in this process, or of a server over gRPC."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.generation import Done, Sampled, SamplingParams, Truncated
from holdfast.models import ModelSource
from holdfast.serving.keys import LOCAL_OWNER
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.view import SessionView

if TYPE_CHECKING:
    import holdfast_sdk
    from holdfast_sdk import AsyncClient, AsyncSession, SessionInfo

    Event = int | range | Done | holdfast_sdk.Done  # a sampled token, positions that left the window, the end

Errors = Callable[[], contextlib.AbstractContextManager[None]]


class LocalSession:
    """One session at a time of a runtime in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._id = ""
        self.sink, self.max_pin = runtime.model.sink, runtime.model.max_pin

    async def open(self, pin_tokens: int) -> None:
        self._id = (await self._runtime.create(LOCAL_OWNER, pin_tokens=pin_tokens)).session_id

    async def turn(self, tokens: Sequence[int], params: SamplingParams) -> "AsyncGenerator[Event, None]":
        async with contextlib.aclosing(self._runtime.generate(self._id, LOCAL_OWNER, params, tokens=tokens)) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Sampled):
                        yield event.token
                    else:
                        yield range(event.first, event.end) if isinstance(event, Truncated) else event

    async def last_token(self) -> int:
        """The end of the history, which may come from an interrupted reply."""
        length = (await self.info()).history_length
        return self._runtime.history(self._id, LOCAL_OWNER, length - 1)[0].tokens[0]

    async def rewind(self, length: int) -> None:
        await self._runtime.rewind(self._id, LOCAL_OWNER, length)

    async def info(self) -> SessionView:
        return self._runtime.info(self._id, LOCAL_OWNER)

    async def close(self) -> None:
        await self._runtime.close(self._id, LOCAL_OWNER)


class ServerSession:
    """The same on a server; `errors` translates those of the SDK."""

    _session: "AsyncSession"
    sink: int
    max_pin: int

    def __init__(self, client: "AsyncClient", address: str, errors: Errors) -> None:
        self._client = client
        self._address = address
        self._errors = errors

    async def connect(self, source: ModelSource) -> None:
        """Check that text means the same tokens on both sides."""
        with self._errors():
            model = await self._client.model_info()
        if model.tokenizer_hash != source.tokenizer_hash:
            raise ConfigError(
                f"{self._address} serves {model.name}, whose tokenizer differs from that of {source.name}; "
                "pass the server's model as --model"
            )
        self.sink, self.max_pin = model.sink, model.max_pin_tokens

    async def open(self, pin_tokens: int) -> None:
        with self._errors():
            self._session = await self._client.create_session(label="holdfast chat", pin_tokens=pin_tokens)

    async def turn(self, tokens: Sequence[int], params: SamplingParams) -> "AsyncGenerator[Event, None]":
        with self._errors():
            generation = await self._session.turn(
                tokens,
                max_tokens=params.max_tokens,
                seed=params.seed,
                temperature=params.temperature,
                top_p=params.top_p,
                stop_token_ids=sorted(params.eos_token_ids),
            )
            num_truncated = 0
            async with generation:
                async for token in generation:
                    for positions in generation.truncated[num_truncated:]:
                        yield positions
                    num_truncated = len(generation.truncated)
                    yield token.id
        for positions in generation.truncated[num_truncated:]:
            yield positions
        yield generation.done

    async def last_token(self) -> int:
        """The end of the history, which may come from an interrupted reply."""
        length = (await self.info()).history_length
        with self._errors():
            chunks = [chunk async for chunk in self._session.history(length - 1)]
        return chunks[-1].token_ids[-1]

    async def rewind(self, length: int) -> None:
        with self._errors():
            await self._session.rewind(length)

    async def info(self) -> "SessionInfo":
        with self._errors():
            return await self._session.info()

    async def close(self) -> None:
        with self._errors():
            await self._session.close()
