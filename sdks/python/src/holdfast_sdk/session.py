"""A session on the server, for blocking code."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Unpack

from holdfast_sdk import convert
from holdfast_sdk.errors import HoldfastError, SessionNotFound
from holdfast_sdk.generation import Generation
from holdfast_sdk.results import (
    Appended,
    Closed,
    Created,
    Forked,
    HistoryChunk,
    Imported,
    Passage,
    Rewound,
    SessionInfo,
)
from holdfast_sdk.sampling import SamplingOptions
from holdfast_sdk.session_flows import SessionFlows
from holdfast_sdk.wire import Wire


class Session:
    """One token history. One operation at a time; as a context manager it is closed at the end.

    `origin` is what the server said when it was made here; None where the client only knew the id.
    """

    def __init__(self, wire: Wire, flows: SessionFlows, origin: Created | Forked | Imported | None = None) -> None:
        self._wire = wire
        self._flows = flows
        self.origin = origin

    @property
    def id(self) -> str:
        return self._flows.session_id

    @property
    def history_length(self) -> int | None:
        """As last heard from the server; None where only the server knows. Makes no call."""
        return self._flows.history_length

    def append(self, token_ids: Iterable[int], *, expected_history_length: int | None = None) -> Appended:
        """Add given tokens. Sent again by itself where the connection fails: they are never added twice."""
        return self._wire.run(self._flows.append(token_ids, expected_history_length))

    def generate(
        self,
        *,
        max_tokens: int,
        expected_history_length: int | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Sample tokens into the history, streamed. `timeout_s` bounds the whole generation (default: no limit)."""
        flow = self._flows.generate(max_tokens, expected_history_length, timeout_s, sampling)
        return Generation(self._wire.stream(self._wire.run(flow)), self._flows)

    def turn(
        self,
        token_ids: Iterable[int],
        *,
        max_tokens: int,
        expected_history_length: int | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """`append` and `generate` in one call, which is never carried out twice."""
        flow = self._flows.turn(token_ids, max_tokens, expected_history_length, timeout_s, sampling)
        return Generation(self._wire.stream(self._wire.run(flow)), self._flows, is_turn=True)

    def fork(self, at_position: int | None = None, label: str = "") -> "Session":
        """A new session with the same history, up to `at_position` if given. This one stays as it is."""
        forked = self._wire.run(self._flows.fork(at_position, label))
        flows = SessionFlows(forked.session_id, self._flows.limits, forked.history_length)
        return Session(self._wire, flows, forked)

    def rewind(self, to_position: int) -> Rewound:
        """Forget the tokens from `to_position` on."""
        return self._wire.run(self._flows.rewind(to_position))

    def info(self) -> SessionInfo:
        return self._wire.run(self._flows.info())

    def history(self, start: int | None = None, end: int | None = None) -> Iterator[HistoryChunk]:
        """All tokens from `start` up to, not including, `end`; those that left the window too."""
        with closing(self._wire.stream(self._wire.run(self._flows.history(start, end)))) as stream:
            for message in stream:
                yield convert.history_chunk(message)

    def search(self, query: str | Iterable[int], *, limit: int = 8, include_in_view: bool = False) -> list[Passage]:
        """Passages of the history that a text, or the text of token ids, is about, the best first.

        Only those that have left the model's view, unless told otherwise. The server needs the model's tokenizer.
        """
        return self._wire.run(self._flows.search(query, limit, include_in_view))

    def export(self, *, with_snapshot: bool = True, timeout_s: float | None = None) -> Iterator[bytes]:
        """The whole session in chunks: write them to a file, or give them to `Client.import_session`.

        Without its snapshot it is much smaller, and is computed again where it is imported. No time limit by itself.
        """
        with closing(self._wire.stream(self._wire.run(self._flows.export(with_snapshot, timeout_s)))) as stream:
            for message in stream:
                yield message.data

    def close(self) -> Closed:
        """End the session; what runs on it is cancelled."""
        return self._wire.run(self._flows.close())

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._flows.is_closed:
            return
        try:
            self.close()
        except SessionNotFound:
            pass  # it is gone, as wished
        except HoldfastError:
            if error is None:  # else the error on its way out says more
                raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"
