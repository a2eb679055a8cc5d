"""What one owner may have at most: sessions, generations at once, places in the queue, bytes. Pure counting."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from holdfast.errors import QuotaExceeded

_MB = 1 << 20


class OwnerQuotas:
    """The same limits for every owner; 0: no limit. Used on one event loop."""

    def __init__(self, *, max_sessions: int = 0, max_running: int = 0, max_queued: int = 0, max_mb: int = 0) -> None:
        self.max_running = max_running
        self._max_sessions = max_sessions
        self._max_queued = max_queued
        self._max_mb = max_mb
        self._num_sessions: Counter[str] = Counter()
        self._num_released = 0
        self._has_released = asyncio.Event()
        self.num_bytes: Counter[str] = Counter()  # on record, by owner

    @property
    def counts_bytes(self) -> bool:
        return self._max_mb > 0

    async def claim_session(self, owner: str, num_on_record: Callable[[], Awaitable[int]] | None) -> None:
        """Count a session that is about to be made. With `num_on_record` the owner's sessions are those on record and
        those that are being made: `release_session` is called when one is on record. Otherwise when it is gone."""
        self.check_bytes(owner)
        while self._max_sessions:
            made = self._num_released
            num = await num_on_record() if num_on_record else 0
            if made != self._num_released:
                continue  # it may be counted, or not
            if num >= self._max_sessions or (num_on_record is None and self._num_sessions[owner] >= self._max_sessions):
                raise QuotaExceeded("sessions", "--owner-max-sessions", self._max_sessions)
            if num + self._num_sessions[owner] < self._max_sessions:
                break
            self._has_released.clear()  # of those that are being made, some may fail
            await self._has_released.wait()
        self._num_sessions[owner] += 1

    def release_session(self, owner: str) -> None:
        self._num_released += 1
        self._has_released.set()
        self._num_sessions[owner] -= 1
        if not self._num_sessions[owner]:
            del self._num_sessions[owner]

    def check_queued(self, owner: str, num_waiting: int) -> None:
        if self._max_queued and num_waiting >= self._max_queued:
            raise QuotaExceeded("requests in the queue", "--owner-max-queued", self._max_queued)

    def check_bytes(self, owner: str) -> None:
        """Refuse whatever would add to the record of an owner that has reached its limit. What is under way ends."""
        if self._max_mb and self.num_bytes[owner] >= self._max_mb * _MB:
            raise QuotaExceeded("MB on record", "--owner-max-mb", self._max_mb)
