"""What is on record of one chat turn: the structure that the tree, the journal, session files and samples share.

`to_stored` and `from_stored` convert it to plain values for a database row or a session file and back, bit for bit:
messages as JSON, tokens and logprobs as little-endian arrays.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

if TYPE_CHECKING:
    Tokens = array[int]
    Logprobs = array[float]
else:
    Tokens = Logprobs = array

N = TypeVar("N", int, float)
Stored = bytes | str | int | float | bool | None
ByteRange = tuple[int, int]  # where something begins and ends in bytes

_Count = Annotated[int, Meta(ge=0)]
_OPTIONAL = (
    "response_id",
    "agent",
    "is_edited",
    "pinned",
    "weight_spans",
    "effort",
    "num_trimmed",
    "recalled",
    "view",
)  # of a turn's facts
_JSON = ("messages", "reply", "root", "facts")


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """What shapes the first prompt and so belongs to a whole conversation: tools, and template variables that show.

    Both are JSON, in the order in which they were rendered.
    """

    tools: str = "[]"
    variables: str = "{}"

    def differs(self, other: "TemplateInputs") -> str | None:
        """The first field whose value is another one; the order of members makes no difference."""
        return next((name for name in ("tools", "variables") if _sorted(self, name) != _sorted(other, name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Quotes of earlier passages among the given tokens of a turn: `length` of them, from `start` on. Each passage by
    the turns of its conversation up to its own, and its place there."""

    start: _Count
    length: _Count
    passages: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """The tokens of a path that a model sees when it goes on: the first `pinned` ones, and those from `start` on."""

    pinned: _Count
    start: _Count

    @property
    def num_hidden(self) -> int:
        return max(0, self.start - self.pinned)

    def of(self, tokens: list[int]) -> list[int]:
        return tokens[: self.pinned] + tokens[max(self.pinned, self.start) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What a trainer must know about a turn besides its tokens."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # the parameters it was sampled with
    logprob_kind: str = "unknown"  # of `logprobs`: raw (before temperature), sampling, or unknown
    weight_versions: tuple[str, str] = ("", "")  # of its first and its last sampled token
    started_at: float = 0.0
    ended_at: float = 0.0
    routed_experts: str | ByteRange | None = None  # base64 of int32 or a list; mostly its range in the response
    indexer_topk: str | ByteRange | None = None
    cut: tuple[ByteRange, ...] = ()  # parts of the response that the client did not get
    response_id: str = ""  # what the client was told, where the API has ids by which it can ask again
    agent: Mapping[str, str] = field(default_factory=dict)  # the client's own ids of its session, thread or agent
    is_edited: bool = False  # the request has another assistant message where a reply was sampled
    pinned: int | None = None  # tokens at the start of this conversation that never leave the window
    weight_spans: tuple[tuple[str, int], ...] = ()  # versions and their numbers of sampled tokens, if several in a turn
    num_trimmed: int = 0  # sampled tokens at the end that are not in the history which the next turn goes on from
    recalled: Recalled | None = None
    view: View | None = None  # what of the path the prompt was made of that an upstream got; None: all
    effort: Mapping[str, int | float] = field(default_factory=dict)  # what the reply took: counts and seconds, by name


_NO_FACTS = TurnFacts()


class TurnRecord(Struct, kw_only=True, forbid_unknown_fields=True, rename={"idempotency_key": "ticket_key"}):
    """One turn. The history after it is the parent's path, then `given`, then `sampled`.

    Everything is fixed once the turn is recorded, except `reward`, `is_delivered`, and the two bodies: they are None
    while only the journal holds them.
    """

    number: _Count
    parent: _Count = 0  # the number of the turn above; 0: none
    messages: tuple[dict[str, Any], ...] = ()  # new in this turn
    reply: dict[str, Any] = msgspec.field(default_factory=dict)
    root: TemplateInputs = TemplateInputs()
    given: Tokens = msgspec.field(default_factory=lambda: array("i"))
    sampled: Tokens = msgspec.field(default_factory=lambda: array("i"))
    logprobs: Logprobs = msgspec.field(default_factory=lambda: array("d"))
    sampling_logprobs: Logprobs = msgspec.field(default_factory=lambda: array("d"))
    finish_reason: str = ""
    facts: TurnFacts = TurnFacts()
    num_control: _Count = 0  # control tokens that the messages spelled out as text
    request: bytes | None = None  # as the backend got it, without the ids that the path holds
    response: bytes | None = None
    reward: float | None = None
    is_delivered: bool = False
    idempotency_key: str = ""
    body_hash: bytes = b""

    @property
    def num_lasting(self) -> int:
        """How many of the sampled tokens the next turn goes on from."""
        return len(self.sampled) - self.facts.num_trimmed


def _sorted(inputs: TemplateInputs, name: str) -> str:
    return json.dumps(json.loads(getattr(inputs, name)), sort_keys=True)


def to_stored(turn: TurnRecord) -> dict[str, Stored]:
    """The turn as plain values under the names that databases and files use, in a fixed order."""
    encoded = msgspec.json.encode
    return {  # each by its name: every turn that is recorded comes through here, and a loop takes twice as long
        "number": turn.number,
        "parent": turn.parent,
        "messages": encoded(turn.messages),
        "reply": encoded(turn.reply),
        "root": encoded(turn.root),
        "given": packed(turn.given),
        "sampled": packed(turn.sampled),
        "logprobs": packed(turn.logprobs),
        "sampling_logprobs": packed(turn.sampling_logprobs),
        "finish_reason": turn.finish_reason,
        "facts": encoded(_told(turn.facts)),
        "num_control": turn.num_control,
        "request": turn.request,
        "response": turn.response,
        "reward": turn.reward,
        "is_delivered": turn.is_delivered,
        "ticket_key": turn.idempotency_key,
        "body_hash": turn.body_hash,
    }


def _told(facts: TurnFacts) -> dict[str, Any]:
    """The facts without those that a turn need not have and does not have."""
    optional = {name: value for name in _OPTIONAL if (value := getattr(facts, name)) != getattr(_NO_FACTS, name)}
    return {name: getattr(facts, name) for name in TurnFacts.__slots__ if name not in _OPTIONAL} | optional


def from_stored(stored: Mapping[str, Any]) -> TurnRecord:
    """What `to_stored` was given. Raises ValueError (msgspec's errors are) where the values do not make a turn."""
    values = dict(stored)
    try:
        values |= {name: msgspec.json.decode(values[name]) for name in _JSON}
        values |= {name: tokens_of(values[name]) for name in ("given", "sampled")}
        values |= {name: floats_of(values[name]) for name in ("logprobs", "sampling_logprobs")}
    except (KeyError, TypeError) as exc:
        raise ValueError(f"a turn lacks a field or has one of another type: {exc}") from exc
    return msgspec.convert(values, TurnRecord)


def packed(values: "array[int] | array[float]") -> bytes:
    """Little-endian, whatever the machine."""
    if values.typecode not in "id":
        raise TypeError(f"tokens are array('i') and logprobs array('d'), got array({values.typecode!r})")
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = values[:]
    swapped.byteswap()
    return swapped.tobytes()


def tokens_of(data: bytes) -> "array[int]":
    return _unpacked(array("i"), data)


def floats_of(data: bytes) -> "array[float]":
    return _unpacked(array("d"), data)


def _unpacked(values: "array[N]", data: bytes) -> "array[N]":
    values.frombytes(data)
    if sys.byteorder != "little":
        values.byteswap()
    return values


# Numbers in a JSON text

_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE = (b"0" * 309, b"0e00", b"0e+00")


def may_overflow(text: bytes) -> bool:
    """Whether a number in `text` may be out of range for JSON decoders; False is certain, and costs little to learn.

    Typed decoding does not check the numbers of members that it skips.
    """
    digits = text.translate(_DIGITS)
    return any(large in digits for large in _LARGE)


# Members of a JSON text by their ranges: cut out while every other byte stays as it is, nothing is parsed again

_SPACE = b" \t\r\n"


def place_of(value: Raw, body: bytes) -> ByteRange:
    """Where in `body`, from which it was decoded, a value starts and ends.

    Computed from addresses, because a Raw is a view into `body` without an offset, and a search could find other text.
    """
    start = _address(value) - _address(body)
    end = start + len(memoryview(value))
    if not (0 <= start <= end <= len(body) and body.startswith(memoryview(value), start)):
        raise RuntimeError("the value is not a view into the body; msgspec.Raw has changed")
    return start, end


def members_at(body: bytes, values: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Where the members with these values start and end, in order, each with a comma that no other one includes."""
    members: list[ByteRange] = []
    for start, end in sorted(values):
        members.append(_member(body, start, end, free_from=members[-1][1] if members else 0))
    return tuple(members)


def without(body: bytes, places: Iterable[ByteRange]) -> bytes:
    """`body` without these places, which must be in order."""
    pieces = []
    at = 0
    for start, end in places:
        pieces.append(body[at:start])
        at = end
    return b"".join((*pieces, body[at:])) if at else body


def _member(body: bytes, start: int, end: int, *, free_from: int) -> ByteRange:
    key_end = body.rindex(b'"', 0, start)
    first = body.rindex(b'"', 0, key_end)
    before, after = first, end
    while before > free_from and body[before - 1] in _SPACE:
        before -= 1
    if before > free_from and body[before - 1 : before] == b",":
        return before - 1, end
    while body[after] in _SPACE:
        after += 1
    return first, after + 1 if body[after : after + 1] == b"," else end


def _address(part: bytes | Raw) -> int:
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return address
