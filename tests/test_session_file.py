"""The file that a session travels in: what goes in comes out, and nothing else is ever taken for one."""

import hashlib
import random
import struct
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SessionFileRefused
from holdfast.generation import StopReason
from holdfast.sessions import session_file as file
from holdfast.sessions.journal.base import SessionOpened, TokensGiven, TokensSampled
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.record import Recalled, TemplateInputs, TurnFacts, TurnRecord, to_stored
from holdfast.sessions.session_file import (
    VERSION,
    ModelIdentity,
    PortableSession,
    Span,
    check_fit,
    decode,
    encode,
    pieces,
)

IDENTITY = ModelIdentity(
    name="m", fingerprint="f", vocab_size=64, tokenizer_hash="t", chat_template_hash="c", recent=16
)
MODEL = ModelInfo(
    name="here",
    fingerprint="f",
    vocab_size=64,
    eos_token_ids=frozenset(),
    tokenizer_hash="t",
    chat_template_hash="c",
    sink=4,
    recent=16,
    max_pin=8,
    context=4096,
)

tokens = st.lists(st.integers(0, 63), max_size=9).map(lambda ids: array("i", ids))
some_tokens = st.lists(st.integers(0, 63), min_size=1, max_size=9).map(lambda ids: array("i", ids))
rewards = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def logprobs(draw: st.DrawFn, length: int) -> "array[float]":
    return array("d", draw(st.lists(st.floats(max_value=0, allow_infinity=False), min_size=length, max_size=length)))


@st.composite
def spans(draw: st.DrawFn) -> Span:
    ids = draw(some_tokens)
    if draw(st.booleans()):
        return TokensGiven("s", ids, is_recalled=draw(st.booleans()))
    reason = draw(st.none() | st.sampled_from([reason.value for reason in StopReason]))
    return TokensSampled("s", ids, draw(logprobs(len(ids))), draw(logprobs(len(ids))), reason)


messages = st.dictionaries(st.text(), st.text() | st.integers(-(2**40), 2**40) | st.none() | st.booleans(), max_size=3)
ranges = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40))


@st.composite
def turns(draw: st.DrawFn, number: int) -> TurnRecord:
    sampled = draw(tokens)
    return TurnRecord(
        number=number,
        parent=draw(st.integers(0, number - 1)),
        messages=tuple(draw(st.lists(messages, max_size=2))),
        reply=draw(messages),
        root=TemplateInputs(draw(st.text()), draw(st.text())),
        given=draw(tokens),
        sampled=sampled,
        logprobs=draw(logprobs(len(sampled))),
        sampling_logprobs=draw(logprobs(len(sampled))),
        finish_reason=draw(st.text()),
        facts=TurnFacts(
            sampling=draw(messages), started_at=draw(st.floats(0, 1e10)), cut=tuple(draw(st.lists(ranges, max_size=2)))
        ),
        num_control=draw(st.integers(0, 9)),
        request=draw(st.binary()),
        response=draw(st.binary()),
        reward=draw(rewards),
        is_delivered=draw(st.booleans()),
    )


@st.composite
def sessions(draw: st.DrawFn) -> PortableSession:
    kind: Any = draw(st.sampled_from(["tokens", "chat"]))
    num_turns = draw(st.integers(0, 4)) if kind == "chat" else 0
    opened = SessionOpened(
        session_id="s",
        number=0,
        owner="",
        created_at=draw(st.floats(0, 1e10)),
        kind=kind,
        label=draw(st.text()),
        group=draw(st.text()),
        metadata=draw(st.dictionaries(st.text(), st.text(), max_size=3)),
        sink=draw(st.integers(0, 8)),
        pin_tokens=draw(st.none() | st.integers(0, 8)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 63), max_size=3))),
    )
    return PortableSession(
        opened=opened,
        model=IDENTITY,
        spans=tuple(draw(st.lists(spans(), max_size=4))) if kind == "tokens" else (),
        turns=tuple(draw(turns(number)) for number in range(1, num_turns + 1)),
        reward=draw(rewards),
        snapshot=draw(st.none() | st.binary()),
    )


def example() -> PortableSession:
    opened = SessionOpened(session_id="s", number=0, owner="", created_at=1.0, label="l", sink=4)
    sampled = TokensSampled("s", array("i", [4, 5]), array("d", [-1, -2]), array("d", [-1, -3]), "eos")
    return PortableSession(
        opened=opened, model=IDENTITY, spans=(TokensGiven("s", array("i", [1, 2, 3])), sampled), snapshot=b"kv" * 99
    )


def chat() -> PortableSession:
    turn = TurnRecord(
        number=1,
        parent=0,
        given=array("i", [1]),
        sampled=array("i", [2]),
        logprobs=array("d", [-1]),
        sampling_logprobs=array("d", [-1]),
    )
    return PortableSession(opened=replace(example().opened, kind="chat"), model=IDENTITY, turns=(turn,))


def written(session: PortableSession) -> bytes:
    return b"".join(encode(session))


def resealed(data: bytes) -> bytes:
    """With a digest that fits: what a stranger could send."""
    return data[:-32] + hashlib.blake2b(data[:-32], digest_size=32).digest()


def refusal_of(data: bytes) -> str:
    with pytest.raises(SessionFileRefused) as caught:
        decode(data)
    return caught.value.reason


@given(sessions())
def test_what_goes_in_comes_out(session: PortableSession) -> None:
    assert decode(written(session)) == session
    assert b"".join(pieces(encode(session), 7)) == written(session)
    assert {len(piece) for piece in list(pieces(encode(session), 7))[:-1]} <= {7}


def test_every_field_of_a_turn_is_in_the_file_but_its_idempotency_key() -> None:
    (stored,) = [to_stored(turn) for turn in chat().turns]
    (tag,) = [at for at in range(len(written(chat()))) if written(chat())[at : at + 4] == b"TURN"]
    size = int.from_bytes(written(chat())[tag + 4 : tag + 12], "little")
    kept = msgspec.msgpack.decode(written(chat())[tag + 12 : tag + 12 + size])
    assert stored.keys() - kept.keys() == {"ticket_key", "body_hash"}
    assert all(kept[name] == stored[name] for name in kept)


def test_no_file_cut_short_is_taken() -> None:
    data = written(example())
    assert {refusal_of(data[:size]) for size in range(len(data))} == {"truncated"}
    assert refusal_of(data + b"x") == "damaged"


def test_no_flipped_bit_is_taken() -> None:
    data = written(example())
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        reason = refusal_of(bytes(flipped))
        assert reason in {"not_a_file", "other_version", "truncated", "damaged"}, at


@given(st.binary(max_size=200))
def test_noise_is_not_taken(data: bytes) -> None:
    assert refusal_of(data) in {"not_a_file", "truncated"}
    assert refusal_of(resealed(written(example())[:12] + data + bytes(44))) in {"truncated", "damaged"}


def test_a_file_of_countless_sections_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(example())  # HEAD, two spans and a snapshot
    monkeypatch.setattr(file, "MAX_SECTIONS", 4)
    assert decode(data) == example()
    monkeypatch.setattr(file, "MAX_SECTIONS", 3)
    assert refusal_of(data) == "damaged"


def test_a_newer_version_is_refused_by_name() -> None:
    data = bytearray(written(example()))
    data[8:12] = struct.pack("<I", VERSION + 1)
    with pytest.raises(SessionFileRefused, match=f"version {VERSION + 1}, this Holdfast supports {VERSION}") as caught:
        decode(resealed(bytes(data)))
    assert caught.value.reason == "other_version"


@pytest.mark.parametrize(
    ("session", "problem"),
    [
        (replace(example(), spans=(TokensGiven("s", array("i")),)), "span 0 is empty"),
        (replace(example(), spans=(replace(example().spans[1], logprobs=array("d", [-1.0])),)), "logprobs of span 0"),
        (
            replace(example(), spans=(replace(example().spans[1], logprobs=array("d", [-1.0, float("nan")])),)),
            "logprobs of span 0",
        ),
        (replace(chat(), turns=(msgspec.structs.replace(chat().turns[0], parent=1),)), "turn 1 is out of order"),
        (replace(chat(), turns=(msgspec.structs.replace(chat().turns[0], number=2),)), "turn 1 is out of order"),
        (replace(chat(), turns=(msgspec.structs.replace(chat().turns[0], logprobs=array("d")),)), "logprobs of turn 1"),
        (replace(chat(), turns=(msgspec.structs.replace(chat().turns[0], reward=float("inf")),)), "reward of turn 1"),
        (
            replace(
                chat(),
                turns=(
                    msgspec.structs.replace(chat().turns[0], facts=TurnFacts(recalled=Recalled(start=1, length=99))),
                ),
            ),
            "turn 1 counts more control, recalled",
        ),
        (replace(chat(), reward=float("nan")), "the session's reward"),
        (replace(chat(), opened=replace(chat().opened, created_at=float("inf"))), "created_at is not a finite number"),
        (replace(chat(), turns=(), spans=example().spans), "a chat session has spans"),
        (replace(example(), spans=(), turns=chat().turns), "a token session has turns"),
    ],
)
def test_what_contradicts_itself_is_refused_whoever_sealed_it(session: PortableSession, problem: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PortableSession, "history_length", 5)
        data = written(session)
    with pytest.raises(SessionFileRefused, match=problem):
        decode(data)


def test_sections_out_of_order_and_strange_records_are_refused() -> None:
    parts = encode(example())
    body, end = parts[1:-2], parts[-2:]
    pairs = [body[index : index + 2] for index in range(0, len(body), 2)]
    for order in (pairs[1:], pairs[::-1], [*pairs, pairs[-1]], [pairs[0], *pairs], []):
        data = b"".join([parts[0], *(part for pair in order for part in pair), *end])
        with pytest.raises(SessionFileRefused, match="not in order"):
            decode(resealed(data))
    for content in (b"", b"\x80", b"\x81\xa1x\x01", random.Random(1).randbytes(50), b"\x91" * 5000):
        strange = [parts[0], struct.pack("<4sQ", b"HEAD", len(content)), content, *end]
        with pytest.raises(SessionFileRefused, match="invalid session file"):
            decode(resealed(b"".join(strange)))


@pytest.mark.parametrize(
    ("session", "model", "reason"),
    [
        (example(), replace(MODEL, fingerprint="g", tokenizer_hash="u"), "other_model"),
        (example(), replace(MODEL, fingerprint="g", tokenizer_hash=""), "other_model"),
        (
            replace(example(), model=replace(IDENTITY, tokenizer_hash="")),
            replace(MODEL, fingerprint="g", tokenizer_hash=""),
            "other_model",
        ),
        (chat(), replace(MODEL, chat_template_hash="d"), "other_template"),
        (example(), replace(MODEL, vocab_size=5), "out_of_vocabulary"),
        (replace(example(), opened=replace(example().opened, eos_token_ids=(64,))), MODEL, "out_of_vocabulary"),
        (example(), replace(MODEL, max_pin=3), "too_many_pins"),
        (example(), MODEL, None),
        (chat(), MODEL, None),
        (example(), replace(MODEL, fingerprint="g"), None),
        (example(), replace(MODEL, chat_template_hash="d"), None),
        (example(), replace(MODEL, recent=8, tokenizer_hash="u"), None),
    ],
)
def test_what_would_mean_something_else_does_not_fit(
    session: PortableSession, model: ModelInfo, reason: str | None
) -> None:
    if reason is None:
        check_fit(session, model)
        return
    with pytest.raises(SessionFileRefused) as caught:
        check_fit(session, model)
    assert caught.value.reason == reason
