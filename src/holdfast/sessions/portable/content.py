"""What of a session travels: its tokens with their spans, or its turns, and what they were made with. Pure data."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from holdfast.sessions.journal.entries import SessionOpened, TokensGiven, TokensSampled, TurnRecorded
from holdfast.sessions.ports import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What gives token ids their meaning."""

    name: str
    fingerprint: str
    vocab_size: int
    tokenizer_hash: str
    chat_template_hash: str
    recent: int

    @classmethod
    def of(cls, model: ModelInfo) -> "ModelIdentity":
        return cls(
            name=model.name,
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            tokenizer_hash=model.tokenizer_hash,
            chat_template_hash=model.chat_template_hash,
            recent=model.recent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableTurn(TurnRecorded):
    """A chat turn with everything on record about it."""

    reward: float | None = None
    is_delivered: bool = False


Span = TokensGiven | TokensSampled


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableSession:
    """A session of tokens has spans, one that chats has turns. Whose it was stays behind, as do its retries' keys."""

    opened: SessionOpened
    model: ModelIdentity
    spans: tuple[Span, ...] = ()
    turns: tuple[PortableTurn, ...] = ()
    reward: float | None = None
    snapshot: bytes | None = None

    def path(self) -> list[PortableTurn]:
        """The turns that the history of a chat is made of: those down to the last one."""
        path: list[PortableTurn] = []
        number = len(self.turns)
        while number:
            path.append(self.turns[number - 1])
            number = self.turns[number - 1].parent
        return path[::-1]

    @property
    def history_length(self) -> int:
        own = sum(len(span.tokens) for span in self.spans)
        return own + sum(len(turn.given) + len(turn.sampled) for turn in self.path())

    def all_tokens(self) -> Iterator[int]:
        """Every token on record, those of branches that were left included, in no order that matters."""
        for span in self.spans:
            yield from span.tokens
        for turn in self.turns:
            yield from chain(turn.given, turn.sampled)


def flaw(session: PortableSession) -> str | None:
    """What contradicts itself in a session; None where nothing does."""
    return next(_flaws(session), None)


def _flaws(session: PortableSession) -> Iterator[str]:
    if session.opened.kind == "chat" and session.spans:
        yield "a chat has turns, not spans"
    if session.opened.kind == "tokens" and session.turns:
        yield "a session of tokens has spans, not turns"
    if not _is_finite(session.opened.created_at):
        yield "it was made at no time"
    if not _is_finite(session.reward):
        yield "the session's reward is not a finite number"
    for index, span in enumerate(session.spans):
        if not span.tokens:
            yield f"span {index} is empty"
        if isinstance(span, TokensSampled) and not _is_sampled(span.tokens, span.logprobs, span.sampling_logprobs):
            yield f"the logprobs of span {index} do not belong to its tokens"
    for number, turn in enumerate(session.turns, start=1):
        if turn.number != number or not 0 <= turn.parent < number:
            yield f"turn {number} is out of order"
        if not _is_sampled(turn.sampled, turn.logprobs, turn.sampling_logprobs):
            yield f"the logprobs of turn {number} do not belong to its tokens"
        if not _is_finite(turn.reward):
            yield f"the reward of turn {number} is not a finite number"


def _is_sampled(tokens: "array[int]", *logprobs: "array[float]") -> bool:
    return all(len(part) == len(tokens) and all(map(math.isfinite, part)) for part in logprobs)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
