"""What a session asks of the server, and what its handle must remember between calls. Shared by sync and async."""

import itertools
from collections.abc import Iterable
from typing import Any

from holdfast_sdk import convert
from holdfast_sdk.errors import HistoryConflict, HoldfastError
from holdfast_sdk.flow import Call, Flow, Limits, Pause, build, growing, once, repeat
from holdfast_sdk.gen import runtime_pb2 as pb
from holdfast_sdk.results import Appended, Closed, Forked, Passage, Rewound, SessionInfo
from holdfast_sdk.sampling import SamplingOptions, to_message

FIRST_POLL_S = 0.005
LONGEST_POLL_S = 0.2
SETTLE_S = 10.0


class SessionFlows:
    """One session's calls. `history_length` is None where only the server knows it."""

    def __init__(self, session_id: str, limits: Limits, history_length: int | None = None) -> None:
        self.session_id = session_id
        self.limits = limits
        self.history_length = history_length
        self.is_closed = False
        self._left_stream = False

    def leave_stream(self) -> None:
        """A generation ended here without its last event: how far the server got is unknown, and it may still run."""
        self.history_length = None
        self._left_stream = True

    def settle(self) -> Flow[None]:
        """After a stream was left, wait until the server has noticed, so that our next call does not find it busy.

        Does not wait for ever; where it gives up, the call itself finds out.
        """
        if not self._left_stream:
            return
        known, limit = self.history_length, self._info_call(SETTLE_S)
        for attempt in itertools.count():
            info = yield from self.info()
            pause = Pause(growing(FIRST_POLL_S, LONGEST_POLL_S, attempt))
            if not info.busy or not limit.has_time_for(pause):
                break
            yield pause
        self._left_stream = False
        if known is not None:
            self.history_length = known

    def info(self) -> Flow[SessionInfo]:
        answer = yield from repeat(self._info_call(), self.limits)
        info = convert.session_info(answer)
        if not info.busy:
            self.history_length = info.history_length
        return info

    def append(self, token_ids: Iterable[int], expected_history_length: int | None) -> Flow[Appended]:
        """Always names the length that it expects, so that sending it again cannot append twice."""
        ids = list(token_ids)
        yield from self.settle()
        expected = self.history_length if expected_history_length is None else expected_history_length
        if expected is None:
            expected = (yield from self.info()).history_length
        call = self._call("AppendTokens", pb.AppendTokensRequest, token_ids=ids, expected_history_length=expected)
        lost: list[HoldfastError] = []
        try:
            result = convert.appended((yield from repeat(call, self.limits, lost)))
        except HistoryConflict as conflict:
            # The known length stays: whoever sends the same again without looking is refused again, not doubled.
            if not lost or conflict.history_length != expected + len(ids):
                raise
            # An earlier attempt had arrived; only its answer was lost.
            self.history_length = conflict.history_length
            return Appended(history_length=expected + len(ids), prefilled_tokens=None, prefill_duration_seconds=None)
        self.history_length = result.history_length
        return result

    def generate(
        self,
        max_tokens: int,
        expected_history_length: int | None,
        timeout_s: float | None,
        options: SamplingOptions,
    ) -> Flow[Flow[Any]]:
        """How to open the stream, once the session is ready for it."""
        sampling = to_message(options)
        yield from self.settle()
        return self._stream(
            "Generate",
            pb.GenerateRequest,
            timeout_s,
            max_tokens=max_tokens,
            expected_history_length=expected_history_length,
            sampling=sampling,
            batch_tokens=True,
        )

    def turn(
        self,
        token_ids: Iterable[int],
        max_tokens: int,
        expected_history_length: int | None,
        timeout_s: float | None,
        options: SamplingOptions,
    ) -> Flow[Flow[Any]]:
        """How to open the stream, once the session is ready for it."""
        sampling, ids = to_message(options), list(token_ids)
        yield from self.settle()
        return self._stream(
            "Turn",
            pb.TurnRequest,
            timeout_s,
            token_ids=ids,
            max_tokens=max_tokens,
            expected_history_length=expected_history_length,
            sampling=sampling,
            batch_tokens=True,
        )

    def fork(self, at_position: int | None, label: str) -> Flow[Forked]:
        yield from self.settle()
        call = self._call("ForkSession", pb.ForkSessionRequest, at_position=at_position, client_label=label)
        return convert.forked((yield from once(call, self.limits)))

    def rewind(self, to_position: int) -> Flow[Rewound]:
        yield from self.settle()
        call = self._call("RewindSession", pb.RewindSessionRequest, to_position=to_position)
        result = convert.rewound((yield from once(call, self.limits)))
        self.history_length = result.history_length
        return result

    def history(self, start: int | None, end: int | None) -> Flow[Flow[Any]]:
        yield from self.settle()
        call = self._call("GetHistory", pb.GetHistoryRequest, from_position=start, to_position=end)
        return repeat(call, self.limits)

    def search(self, query: str | Iterable[int], limit: int, include_in_view: bool) -> Flow[list[Passage]]:
        asked = {"query": query} if isinstance(query, str) else {"query_token_ids": list(query)}
        yield from self.settle()
        call = self._call(
            "SearchHistory", pb.SearchHistoryRequest, limit=limit, include_in_view=include_in_view, **asked
        )
        answer = yield from repeat(call, self.limits)
        return [convert.passage(message) for message in answer.passages]

    def export(self, with_snapshot: bool, timeout_s: float | None) -> Flow[Flow[Any]]:
        yield from self.settle()
        return self._stream("ExportSession", pb.ExportSessionRequest, timeout_s, without_snapshot=not with_snapshot)

    def close(self) -> Flow[Closed]:
        result = convert.closed((yield from once(self._call("CloseSession", pb.CloseSessionRequest), self.limits)))
        self.is_closed = True
        return result

    def _info_call(self, timeout_s: float | None = None) -> Call:
        return self._call("GetSessionInfo", pb.GetSessionInfoRequest, timeout_s)

    def _call(self, rpc: str, message: type[object], timeout_s: float | None = None, **fields: object) -> Call:
        return self.limits.call(rpc, build(message, session_id=self.session_id, **fields), timeout_s)

    def _stream(self, rpc: str, message: type[object], timeout_s: float | None, **fields: object) -> Flow[Any]:
        """A generation or an export takes as long as it takes, unless told otherwise."""
        call = Limits(timeout_s).call(rpc, build(message, session_id=self.session_id, **fields))
        return once(call, self.limits)
