"""Lets one test drive the blocking and the asyncio client: `await settled(call)`, `async for x in each(items)`."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def each(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


async def every(items: Iterable[Any] | AsyncIterable[Any]) -> list[Any]:
    return [item async for item in each(items)]
