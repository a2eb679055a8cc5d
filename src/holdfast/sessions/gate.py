"""One operation at a time, and closing beats busy. Pure state: used on one event loop, never waits."""

from holdfast.errors import SessionBusy, SessionNotFound


class SessionGate:
    """`enter` and `leave` around every operation; `close` once, from any moment on."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._is_busy = False
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def enter(self) -> None:
        if self._is_closed:
            raise SessionNotFound(self._session_id, detail="closed")
        if self._is_busy:
            raise SessionBusy(f"session {self._session_id} is busy with another operation")
        self._is_busy = True

    def leave(self) -> None:
        self._is_busy = False

    def close(self) -> None:
        if self._is_closed:
            raise SessionNotFound(self._session_id, detail="closed")
        self._is_closed = True
