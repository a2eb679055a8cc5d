"""A session as a file: `HOLDFAST`, a version, sections, and a digest over all of it at the end.

A section is a tag of four letters, its length (8 bytes, little-endian) and its content: `HEAD`, then every `SPAN` or
`TURN` in order, `SNAP` where the cache travels along, `END!`. Records are MessagePack, arrays little-endian int32 and
float64, the snapshot as the engine wrote it. What is not exactly right is refused: nothing is guessed.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from holdfast import __version__
from holdfast.errors import SessionFileRefused
from holdfast.generation import StopReason
from holdfast.sessions.journal.base import SessionKind, SessionOpened, TokensGiven, TokensSampled
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.record import TurnRecord, floats_of, from_stored, packed, to_stored, tokens_of

MAGIC = b"HOLDFAST"
VERSION = 1
MAX_SECTIONS = 4_000_000

_START = struct.Struct("<8sI")
_SECTION = struct.Struct("<4sQ")
_DIGEST_BYTES = 32
_MAX_COUNT = 2**31 - 1
_Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]

T = TypeVar("T")


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
        return own + sum(len(turn.given) + turn.num_lasting for turn in self.path())

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
    if session.opened.kind != "tokens" and session.spans:
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
        if not _counts_fit(turn):
            yield f"turn {number} counts more control, recalled or left out tokens than it can have"


def _is_sampled(tokens: "array[int]", *logprobs: "array[float]") -> bool:
    return all(len(part) == len(tokens) and all(map(math.isfinite, part)) for part in logprobs)


def _counts_fit(turn: TurnRecord) -> bool:
    quotes = turn.facts.recalled
    return (
        turn.num_control <= _MAX_COUNT
        and 0 <= turn.facts.num_trimmed <= len(turn.sampled)
        and (quotes is None or quotes.start + quotes.length <= len(turn.given))
    )


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
    if session.opened.kind != "tokens" and theirs.chat_template_hash != model.chat_template_hash:
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


class _Head(Struct, kw_only=True, forbid_unknown_fields=True):
    written_by: str
    session_id: str
    created_at: float
    kind: SessionKind
    label: str
    group: str
    metadata: dict[str, str]
    sink: _Count
    pin_tokens: _Count | None
    eos_token_ids: tuple[_Count, ...]
    reward: float | None
    model: ModelIdentity
    history_length: Annotated[int, Meta(ge=0)]


class _Span(Struct, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["given", "recalled", "sampled"]
    tokens: bytes
    logprobs: bytes = b""
    sampling_logprobs: bytes = b""
    stop_reason: StopReason | None = None


class _VersionedSpan(_Span, kw_only=True, forbid_unknown_fields=True):
    """Only where it has a version: others stay readable for earlier Holdfasts."""

    weight_version: str = ""


_STAYS = ("ticket_key", "body_hash")  # of a turn: its client's retries do not follow it to another server


def encode(session: PortableSession) -> list[bytes]:
    """The file in parts, to be sent one after the other. Blocks while it sums up all of them."""
    parts = [_START.pack(MAGIC, VERSION)]
    for tag, content in _sections(session):
        parts += [_SECTION.pack(tag, len(content)), content]
    parts.append(_SECTION.pack(b"END!", _DIGEST_BYTES))
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def pieces(parts: Sequence[bytes], num_bytes: int = 1 << 20) -> Iterator[bytes]:
    """The same bytes in pieces of that size, the last one smaller."""
    waiting = bytearray()
    for content in parts:
        part, at = memoryview(content), 0
        while at < len(part):
            taken = part[at : at + num_bytes - len(waiting)]
            waiting += taken
            at += len(taken)
            if len(waiting) == num_bytes:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def decode(data: bytes | bytearray | memoryview) -> PortableSession:
    """The session in a file. Raises SessionFileRefused where it is none, was cut short, or a bit of it is wrong."""
    view = memoryview(data).cast("B")
    sections = _checked_sections(view)
    try:
        session, length = _session(sections)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise SessionFileRefused(f"invalid session file: {exc}", reason="damaged") from exc
    problem = flaw(session)
    if problem is None and session.history_length != length:
        problem = f"the history has {session.history_length} tokens, the header says {length}"
    if problem is not None:
        raise SessionFileRefused(f"invalid session file: {problem}", reason="damaged")
    return session


# Writing


def _sections(session: PortableSession) -> Iterator[tuple[bytes, bytes]]:
    encoder = msgspec.msgpack.Encoder()
    yield b"HEAD", encoder.encode(_head(session))
    for span in session.spans:
        yield b"SPAN", encoder.encode(_packed_span(span))
    for turn in session.turns:
        stored = to_stored(turn)
        yield b"TURN", encoder.encode({name: value for name, value in stored.items() if name not in _STAYS})
    if session.snapshot is not None:
        yield b"SNAP", session.snapshot


def _head(session: PortableSession) -> _Head:
    opened = session.opened
    return _Head(
        written_by=__version__,
        session_id=opened.session_id,
        created_at=opened.created_at,
        kind=opened.kind,
        label=opened.label,
        group=opened.group,
        metadata=dict(opened.metadata),
        sink=opened.sink,
        pin_tokens=opened.pin_tokens,
        eos_token_ids=opened.eos_token_ids,
        reward=session.reward,
        model=session.model,
        history_length=session.history_length,
    )


def _packed_span(span: Span) -> _Span:
    if isinstance(span, TokensGiven):
        return _Span(kind="recalled" if span.is_recalled else "given", tokens=packed(span.tokens))
    fields: dict[str, Any] = {
        "kind": "sampled",
        "tokens": packed(span.tokens),
        "logprobs": packed(span.logprobs),
        "sampling_logprobs": packed(span.sampling_logprobs),
        "stop_reason": StopReason(span.stop_reason) if span.stop_reason else None,
    }
    version = span.weight_version
    return _VersionedSpan(**fields, weight_version=version) if version else _Span(**fields)


# Reading


def _checked_sections(view: memoryview) -> list[tuple[bytes, memoryview]]:
    """All sections but the last, which sums them up."""
    if len(view) < _START.size or view[: len(MAGIC)] != MAGIC:
        is_cut = len(view) < _START.size and MAGIC.startswith(bytes(view[: len(MAGIC)]))
        raise _truncated(len(view)) if is_cut else SessionFileRefused("this is not a session file", reason="not_a_file")
    version = _START.unpack_from(view)[1]
    if version != VERSION:
        raise SessionFileRefused(
            f"the session file has version {version}, this Holdfast supports {VERSION}; use the one that wrote it",
            reason="other_version",
        )
    sections: list[tuple[bytes, memoryview]] = []
    at = _START.size
    while True:
        if at + _SECTION.size > len(view):
            raise _truncated(len(view))
        tag, length = _SECTION.unpack_from(view, at)
        start, at = at + _SECTION.size, at + _SECTION.size + length
        if at > len(view):
            raise _truncated(len(view))
        if tag == b"END!":
            break
        if len(sections) == MAX_SECTIONS:  # each takes far more memory than room in the file
            raise SessionFileRefused(f"the session file has more than {MAX_SECTIONS:,} sections", reason="damaged")
        sections.append((tag, view[start:at]))
    if hashlib.blake2b(view[:start], digest_size=_DIGEST_BYTES).digest() != view[start:at] or at != len(view):
        raise SessionFileRefused(
            "the session file is damaged: its digest does not match its content; export it again", reason="damaged"
        )
    return sections


def _truncated(size: int) -> SessionFileRefused:
    return SessionFileRefused(
        f"the session file is truncated after {size:,} bytes, or damaged; copy or export it again",
        reason="truncated",
    )


def _session(sections: list[tuple[bytes, memoryview]]) -> tuple[PortableSession, int]:
    """The session, and how long its history is said to be."""
    tags = [tag for tag, _ in sections]
    num_spans, num_turns, num_snapshots = tags.count(b"SPAN"), tags.count(b"TURN"), tags.count(b"SNAP")
    order = [b"HEAD", *[b"SPAN"] * num_spans, *[b"TURN"] * num_turns, *[b"SNAP"] * min(1, num_snapshots)]
    if tags != order:
        raise ValueError("the sections are not in order")
    head = _decoded(sections[0][1], _Head)
    own = SessionOpened(
        session_id=head.session_id,
        number=0,
        owner="",
        created_at=head.created_at,
        kind=head.kind,
        label=head.label,
        group=head.group,
        metadata=head.metadata,
        sink=head.sink,
        pin_tokens=head.pin_tokens,
        eos_token_ids=head.eos_token_ids,
    )
    session = PortableSession(
        opened=own,
        model=head.model,
        spans=tuple(_span(content, head.session_id) for tag, content in sections if tag == b"SPAN"),
        turns=tuple(_turn(content) for tag, content in sections if tag == b"TURN"),
        reward=head.reward,
        snapshot=bytes(sections[-1][1]) if num_snapshots else None,
    )
    return session, head.history_length


def _span(content: memoryview, session_id: str) -> Span:
    span = _decoded(content, _VersionedSpan)
    tokens = tokens_of(span.tokens)
    if span.kind != "sampled":
        return TokensGiven(session_id, tokens, is_recalled=span.kind == "recalled")
    reason = span.stop_reason.value if span.stop_reason else None
    logprobs = floats_of(span.logprobs), floats_of(span.sampling_logprobs)
    return TokensSampled(session_id, tokens, *logprobs, reason, span.weight_version)


def _turn(content: memoryview) -> TurnRecord:
    stored = _decoded(content, dict[str, Any])
    expected = set(TurnRecord.__struct_encode_fields__).difference(_STAYS)
    if stored.keys() != expected:
        raise ValueError(f"a turn has other fields than expected: {', '.join(sorted(stored.keys() ^ expected))}")
    return from_stored(stored)


def _decoded(content: memoryview, kind: type[T]) -> T:
    return msgspec.msgpack.decode(content, type=kind)
