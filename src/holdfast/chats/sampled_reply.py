"""A reply of our own engine: its events in, pieces of text and at last the whole reply out."""

from collections.abc import Iterator, Sequence

from holdfast.chat.answer import Answer, Piece
from holdfast.chats.events import ReplyEnd, TokenUsage
from holdfast.errors import ContextTooLong
from holdfast.generation import Done, Event, Sampled, StopReason
from holdfast.sessions.ports import ModelInfo


class SampledReply:
    """`take` every batch until it ends or `is_stopped`, then `finish`. Once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._done: Done | None = None  # None where a stop string cut it short

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the reply: nothing that is sampled from here on belongs to it."""
        return self._answer.is_stopped

    @property
    def num_tokens(self) -> int:
        return len(self._answer.tokens)

    @property
    def num_reasoning(self) -> int:
        return self._answer.num_reasoning

    def take(self, batch: Sequence[Event]) -> Iterator[Piece]:
        for event in batch:
            if isinstance(event, Sampled):
                yield self._answer.push(event)
                if self.is_stopped:
                    return
            elif isinstance(event, Done):
                self._done = event

    def finish(self) -> Piece:
        """What was held back until the end was certain."""
        return self._answer.finish()

    def ending(self, usage: TokenUsage, *, seed: int) -> ReplyEnd:
        answer, done = self._answer, self._done
        matched_stop: str | int | None = None  # the stop string, or the token that ended the reply
        if answer.is_stopped:
            matched_stop = answer.reader.stopped_by
        elif done and done.stop_reason in (StopReason.EOS, StopReason.STOP_TOKEN):
            matched_stop = answer.tokens[-1].token
        return ReplyEnd(
            message=answer.message,
            finish_reason=answer.finish_reason(done.stop_reason if done else None),
            tokens=tuple(answer.tokens),
            usage=usage,
            matched_stop=matched_stop,
            seed=seed,
        )


def check_fits(num_new: int, model: ModelInfo, *, may_truncate: bool, field: str = "messages") -> None:
    """Raises where new tokens exceed the window, unless the caller has agreed that they are cut."""
    limit = model.sink + model.recent
    if num_new > limit and not may_truncate:
        raise ContextTooLong(
            f"{field}: {num_new} new tokens exceed the window of {limit}; "
            'send fewer, set "truncation": "auto", or serve with a larger --recent',
            param=field,
        )
