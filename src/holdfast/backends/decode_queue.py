"""Where heavy work on replies is done, so that the event loop stays responsive. Knows nothing of the work itself."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 64 << 10  # about 50 microseconds of decoding: not worth a pass of the loop

T = TypeVar("T")


class DecodeQueue:
    """Decoding in single file, and a bounded pool of threads. Used on one event loop; `close` it with the app."""

    def __init__(self, cpu_workers: int = 0, *, inline_bytes: int = INLINE_BYTES) -> None:
        self.num_workers = cpu_workers or min(16, os.cpu_count() or 1)
        self._inline_bytes = inline_bytes
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(self.num_workers)
        self._pool: ThreadPoolExecutor | None = None

    async def decode(self, work: Callable[[], T], num_bytes: int) -> T:
        """The result of `work` on a body of `num_bytes`. Large ones take one pass of the loop each, in order.

        Decoding holds the interpreter lock, so threads would only add switches (`holdfast bench responsiveness`).
        """
        if num_bytes <= self._inline_bytes:
            return work()
        async with self._turn:
            await asyncio.sleep(0)  # whoever else is ready comes first
            return work()

    async def offload(self, work: Callable[[], T]) -> T:
        """The result of `work` from a thread: for what releases the interpreter lock, such as hashing and disk.

        At most `num_workers` at once; the others wait here, where they can be cancelled.
        """
        async with self._places:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="holdfast-cpu")
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
