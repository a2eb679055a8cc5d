"""Members cut out of a JSON text, every other byte left as it is. Nothing is parsed or written again."""

from collections.abc import Iterable

import numpy as np
from msgspec import Raw

from holdfast.sessions.record import ByteRange

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
