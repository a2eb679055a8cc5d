"""What a client may send, at both endpoints and in session files: how slowly, how many, how long."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_BYTES_PER_S = 4096


class Pace:
    """How long a client may keep us waiting while it sends: every byte that arrives buys a little time.

    Only waiting counts: a client that we keep waiting loses nothing.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = self._left_s = patience_s

    async def wait_for(self, arrival: Awaitable[T]) -> T:
        """What arrives. TimeoutError where the client has used up its time."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                return await arrival
        finally:
            self._left_s -= time.monotonic() - started

    def received(self, num_bytes: int) -> None:
        self._left_s = min(self._patience_s, self._left_s + num_bytes / _BYTES_PER_S)
