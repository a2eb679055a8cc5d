"""JSON objects as text: where one ends, and its members as they are spelled. Values are checked, never rewritten."""

import json
import re
from typing import Any, Never

_NOT_BLANK = re.compile(r"[^ \t\r\n]")
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')


class ObjectScan:
    """Takes white space and one JSON object from text that arrives in pieces.

    It only counts brackets, so that each character is read once; whether the object is valid JSON is checked later.
    It is broken as soon as it cannot be an object: no brace at its start, a `<` outside a string, or a control
    character inside a string.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that was taken."""
        return "".join(self._parts)

    def push(self, text: str) -> str:
        """What is left of `text`; not empty only when the object is done or broken."""
        index = 0
        while index < len(text) and not self.is_done and not self.is_broken:
            index = self._in_text(text, index) if self._in_string else self._outside(text, index)
        self._parts.append(text[:index])
        return text[index:]

    def _outside(self, text: str, index: int) -> int:
        found = (_STRUCTURE if self._depth else _NOT_BLANK).search(text, index)
        if found is None:
            return len(text)
        char = found[0]
        if char == "<" or (not self._depth and char != "{"):
            self.is_broken = True
            return found.start()
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        self.is_done = not self._depth
        return found.end()

    def _in_text(self, text: str, index: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return index + 1
        found = _IN_STRING.search(text, index)
        if found is None:
            return len(text)
        self._in_string = found[0] != '"'
        self._is_escaped = found[0] == "\\"
        self.is_broken = found[0] < " "
        return found.start() if self.is_broken else found.end()


def is_object(text: str) -> bool:
    try:
        return isinstance(_JSON.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object, each with its value and the value's text. ValueError if it is not an object."""
    found: dict[str, tuple[Any, str]] = {}
    if not isinstance(_JSON.decode(text), dict):
        raise ValueError("not an object")
    index = _skip_blank(text, text.index("{") + 1)
    while text[index] != "}":
        key, index = _JSON.raw_decode(text, index)
        start = _skip_blank(text, text.index(":", index) + 1)
        value, end = _JSON.raw_decode(text, start)
        found[key] = (value, text[start:end])
        index = _skip_blank(text, end)
        if text[index] == ",":
            index = _skip_blank(text, index + 1)
    return found


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


# Numbers are only checked, never used: as floats they may have any number of digits.
_JSON = json.JSONDecoder(parse_constant=_refuse, parse_int=float)
_BLANK = re.compile(r"[ \t\r\n]*")


def _skip_blank(text: str, index: int) -> int:
    found = _BLANK.match(text, index)
    return found.end() if found else index
