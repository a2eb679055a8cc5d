"""Good JSON made bad, by a seeded random number generator: at any field, in any shape, down to its bytes."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

HUGE = "HUGE_NUMBER"  # stands in a body for a literal that json.dumps cannot write
DEEP = "DEEP_NESTING"

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), "", "x", "\x00", "\ud800", "\U0010ffff", "<|im_end|>", "{", "assistant", "stop",
    "abort", "x" * 3000, [], {}, [[]], [{}], {"": {}}, [None], ["x"] * 300, {"a": 1}, {"type": "object"}, {"$ref": "#"},
    {"self": 1}, HUGE, DEEP,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside `value`, that of `value` first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutated(self, good: Any) -> Any:
        """A changed copy: one to three values replaced, removed, added, repeated or exchanged."""
        value = copy.deepcopy(good)
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            value = self._changed(value)
        return value

    def encoded(self, value: Any) -> bytes:
        """As JSON, with what JSON cannot hold, and sometimes with a few wrong bytes."""
        text = json.dumps(value)
        if HUGE in text:
            text = text.replace(f'"{HUGE}"', self.random.choice(("1e999", "9" * 5000, "-1e999", "1" * 400)))
        if DEEP in text:
            depth = self.random.choice((60, 120, 900, 5000))
            text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
        body = text.encode()
        return self.spoilt(body) if self.random.random() < 0.1 else body

    def spoilt(self, body: bytes) -> bytes:
        """A few bytes changed, inserted or cut."""
        bytes_, number = bytearray(body), self.random
        match number.randrange(4):
            case 0 if bytes_:
                bytes_[number.randrange(len(bytes_))] = number.randrange(256)
            case 1:
                bytes_ = bytes_[: number.randrange(len(bytes_) + 1)]
            case 2:
                place = number.randrange(len(bytes_) + 1)
                bytes_[place:place] = number.randbytes(number.randrange(1, 9))
            case _:
                bytes_ += number.choice((b"\x00", b"{}", b"\n\n", b"]", b"\xff"))
        return bytes(bytes_)

    def _odd(self) -> Any:
        return copy.deepcopy(self.random.choice(ODD))

    def _changed(self, value: Any) -> Any:
        number = self.random
        path = number.choice(list(places(value)))
        if not path:
            return self._odd() if number.random() < 0.2 else value
        parent, key = at(value, path[:-1]), path[-1]
        match number.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[number.choice(("unknown", "", "__class__", "stream", "n", "x" * 300))] = self._odd()
            case 1 | 2 if isinstance(parent, list):
                parent.insert(key, parent[key])
            case 3 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
                parent[key] += number.choice((1, -1, 0.5, 10**6, -(10**6)))
            case 4:
                other = number.choice(list(places(value)))
                parent[key] = copy.deepcopy(at(value, other))
            case _:
                parent[key] = self._odd()
        return value
