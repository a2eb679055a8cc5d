"""From a session's events to a reply, until it ends by itself, by a stop string or by its caller."""

import contextlib
from collections.abc import AsyncGenerator, Sequence

from holdfast.chat.reply import AssistantReply, ReplyPiece
from holdfast.generation import Done, Sampled, SamplingParams, StopReason
from holdfast.sessions.journal.entries import SessionKind
from holdfast.sessions.runtime import Runtime


class ReplyStream:
    """One generation of one session, read as a reply. `pieces` once; then the rest tells what came of it."""

    def __init__(self, runtime: Runtime, session_id: str, owner: str, answer: AssistantReply) -> None:
        self.answer = answer
        self.done: Done | None = None  # None where a stop string cut it short
        self._runtime = runtime
        self._session_id = session_id
        self._owner = owner

    async def pieces(
        self,
        params: SamplingParams,
        tokens: Sequence[int] = (),
        *,
        expected_length: int | None = None,
        writes: SessionKind = "tokens",
    ) -> AsyncGenerator[ReplyPiece, None]:
        """The reply as it comes, the held-back rest included. Close it to cancel."""
        batches = self._runtime.generate(
            self._session_id, self._owner, params, tokens=tokens, expected_length=expected_length, writes=writes
        )
        async with contextlib.aclosing(batches):
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Sampled):
                        yield self.answer.push(event)
                        if self.answer.is_stopped:
                            break
                    elif isinstance(event, Done):
                        self.done = event
                if self.answer.is_stopped:
                    break
        yield self.answer.finish()

    @property
    def finish_reason(self) -> str:
        return self.answer.finish_reason(self.done.stop_reason if self.done else None)

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string, or the token that ended the reply."""
        if self.answer.is_stopped:
            return self.answer.reader.stopped_by
        if self.done and self.done.stop_reason in (StopReason.EOS, StopReason.STOP_TOKEN):
            return self.answer.tokens[-1].token
        return None
