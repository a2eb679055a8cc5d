"""What a session file holds: tokens with their spans, or turns, and the model they were made with. Pure data."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from holdfast.errors import SessionFileRefused
from holdfast.sessions.journal.base import SessionOpened, TokensGiven, TokensSampled
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.record import TurnRecord


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


Span = TokensGiven | TokensSampled


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableSession:
    """A token session has spans, a chat session has turns. Its owner and idempotency keys are left out."""

    opened: SessionOpened
    model: ModelIdentity
    spans: tuple[Span, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    reward: float | None = None
    snapshot: bytes | None = None

    def path(self) -> list[TurnRecord]:
        """The turns that the history of a chat is made of: those down to the last one."""
        path: list[TurnRecord] = []
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
        yield "a chat session has spans"
    if session.opened.kind == "tokens" and session.turns:
        yield "a token session has turns"
    if not _is_finite(session.opened.created_at):
        yield "created_at is not a finite number"
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


def check_fit(session: PortableSession, model: ModelInfo) -> None:
    """Raises SessionFileRefused where its tokens would mean something else here, or cannot be kept as they were.

    Other weights with the same tokenizer are fine: the tokens stay, the cache is computed again.
    """
    theirs = session.model
    is_same = theirs.fingerprint == model.fingerprint
    if not is_same and not (theirs.tokenizer_hash and theirs.tokenizer_hash == model.tokenizer_hash):
        raise SessionFileRefused(
            f"the session was made with {_named(theirs.name)}, whose tokenizer differs from that of "
            f"{_named(model.name)}: its token ids would mean something else here",
            reason="other_model",
        )
    if session.opened.kind == "chat" and theirs.chat_template_hash != model.chat_template_hash:
        raise SessionFileRefused(
            f"the chat was rendered with another chat template than that of {_named(model.name)}: "
            "its next turns would not fit its past",
            reason="other_template",
        )
    _check_vocabulary(session, model)
    sink = max(session.opened.sink, session.opened.pin_tokens or 0)
    if sink > model.max_pin:
        raise SessionFileRefused(
            f"the session pins its first {sink} tokens, and this server allows {model.max_pin}; raise --max-pin",
            reason="too_many_pins",
        )


def _check_vocabulary(session: PortableSession, model: ModelInfo) -> None:
    for name, tokens in (("history", session.all_tokens()), ("eos_token_ids", session.opened.eos_token_ids)):
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise SessionFileRefused(
                    f"the session's {name} has token {token}, outside the vocabulary of {model.vocab_size}",
                    reason="out_of_vocabulary",
                )


def _named(name: str) -> str:
    return repr(name[:100])
