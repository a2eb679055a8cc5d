"""Connections whose client does not read: they are ended, so that nothing waits for them and no memory is held.

uvicorn stops an application that sends faster than its client reads (more than 64 KiB unsent). This ends the wait.
"""

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)


def protocol_class(stall_s: float) -> type[asyncio.Protocol]:
    """HTTP/1.1 connections that are aborted when unsent data did not get less for `stall_s`; 0: never."""

    class GuardedProtocol(H11Protocol):
        _watch: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._look_later()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_looking()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_looking()
            super().connection_lost(exc)

        def _look_later(self) -> None:
            if stall_s:
                unsent = self.transport.get_write_buffer_size()
                self._watch = self.loop.call_later(stall_s, self._look, unsent)

        def _look(self, unsent_before: int) -> None:
            if self.transport.get_write_buffer_size() < unsent_before:
                self._look_later()
            else:
                logger.info("a client has read nothing for %g s and is disconnected", stall_s)
                self.transport.abort()

        def _stop_looking(self) -> None:
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

    return GuardedProtocol
