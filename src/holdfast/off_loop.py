"""Work that would hold up the event loop goes into a thread; small work stays, as a thread would cost more."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 1 << 16

T = TypeVar("T")


async def run_off_loop(work: Callable[[], T], num_bytes: int) -> T:
    """The result of `work` on a request of that size."""
    return work() if num_bytes < LARGE_BYTES else await asyncio.to_thread(work)
