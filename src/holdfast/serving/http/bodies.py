"""Request bodies by type. One that does not fit is refused by the path of the field that is wrong.

Fields that a type does not have are left out and named, or refused as well, as the server is set. The strict conversion
is tried first: a usual request costs nothing more.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from holdfast.backends.fields import DECISIVE
from holdfast.chat.messages import ANY_TEXT, MAX_IGNORED, IgnoredFields, read_messages
from holdfast.chats.turn import run_off_loop
from holdfast.errors import InvalidArgument, PayloadTooLarge
from holdfast.serving.http.schema import ChatCompletion, RelayedChat, Tool
from holdfast.sessions.record import may_overflow

T = TypeVar("T")

_LARGE = 256 << 10  # bytes; the values of larger bodies are counted before they are decoded
_SMALL = 1 << 20  # bytes; larger bodies are not searched for the field that is wrong
_MAX_PLAIN = 8 << 20  # bytes of a body that is no chat
_MAX_COMMAS = 2_000_000
_MAX_DIGITS = 400  # of an integer; longer ones are out of range for every field


def decode(body: bytes, kind: type[T], *, may_be_empty: bool = False) -> T:
    """The body as `kind`, or InvalidArgument that names the field. On the event loop, so it must not be large."""
    if len(body) > _MAX_PLAIN:
        raise PayloadTooLarge(f"the request body is larger than {_MAX_PLAIN >> 20} MB, which is the most for this path")
    if may_be_empty and not body.strip():
        body = b"{}"
    try:
        decoded = msgspec.json.decode(body, type=kind)
        if may_overflow(body):  # perhaps in a field that `kind` skips, but that others read later
            msgspec.json.decode(body)
        return decoded
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _decode_error(body, kind, exc) from exc
    except RecursionError as exc:
        raise InvalidArgument("the request body is nested too deeply") from exc


@dataclass(frozen=True, slots=True)
class Decoded(Generic[T]):
    """A body by type, the messages of a chat in normal form.

    `fields` are its fields as they came, less those that are ignored; `ignored` are the paths of those.
    """

    body: T
    fields: dict[str, Any]
    ignored: tuple[str, ...] = ()

    def without(self, names: Sequence[str]) -> "Decoded[T]":
        """The same, with these fields ignored too."""
        if not names:
            return self
        kept = {name: value for name, value in self.fields.items() if name not in names}
        return Decoded(self.body, kept, (*self.ignored, *names)[:MAX_IGNORED])


async def decode_chat(
    raw: bytes, kind: type[T], *, may_ignore: bool, unread: frozenset[str] = frozenset()
) -> Decoded[T]:
    """The body as `kind`, without unknown fields where these may be ignored. A large one is decoded in a thread.

    `unread`: known fields that have no effect here. They are never refused, and named with the unknown ones.
    """
    _check_values(raw)

    def decoded() -> Decoded[T]:
        try:
            fields = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise _decode_error(raw, kind, exc) from exc
        except RecursionError as exc:
            raise InvalidArgument("the request body is nested too deeply") from exc
        return convert_chat(fields, kind, may_ignore=may_ignore, unread=unread, num_bytes=len(raw))

    return await run_off_loop(decoded, len(raw))


def convert_chat(
    fields: dict[str, Any],
    kind: type[T],
    *,
    may_ignore: bool,
    unread: frozenset[str] = frozenset(),
    num_bytes: int = 0,
) -> Decoded[T]:
    """As `decode_chat`, for a body that is decoded already, or translated from another API. `fields` do not change."""
    ignored = IgnoredFields() if may_ignore else None
    try:
        fields = _with_functions(fields, ignored)
        try:
            body = msgspec.convert(fields, kind)
        except msgspec.ValidationError:
            if ignored is None:
                raise
            fields = _known(fields, kind, "", ignored)
            body = msgspec.convert(fields, kind)
        if isinstance(body, RelayedChat) and ignored and body.tools and not _fits(body.tools, list[Tool]):
            fields = fields | {"tools": _known(body.tools, list[Tool], "tools", ignored)}
        if isinstance(body, ChatCompletion | RelayedChat):
            num = ignored.num if ignored else 0
            body.messages = read_messages(body.messages, ignored=ignored)
            if ignored and ignored.num > num:  # neither an upstream nor the record gets what was left out
                fields = fields | {"messages": body.messages}
    except msgspec.ValidationError as exc:
        if num_bytes >= _SMALL:
            raise InvalidArgument(f"the request body is not valid: {exc}") from exc
        raise _refusal(fields, kind, "") from exc
    except RecursionError as exc:
        raise InvalidArgument("the request body is nested too deeply") from exc
    decoded = Decoded(body, fields, tuple(ignored.paths) if ignored else ())
    return decoded.without([name for name in unread if fields.get(name) is not None]) if unread else decoded


def _with_functions(fields: dict[str, Any], ignored: IgnoredFields | None) -> dict[str, Any]:
    """The body of a chat whose tools are all functions. A custom tool becomes a function with one text, `input`; tools
    of other types, which only their own servers can run, are left out and named."""
    tools = fields.get("tools") if isinstance(fields, dict) else None
    if not isinstance(tools, list) or all(_type_of(tool) == "function" for tool in tools):
        return fields
    functions = []
    for index, tool in enumerate(tools):
        if _type_of(tool) == "custom" and isinstance(custom := tool.get("custom"), dict):
            if ignored is not None and custom.get("format"):
                ignored.add(f"tools[{index}].custom.format")
            known = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
            functions.append({"type": "function", "function": known | {"parameters": ANY_TEXT}})
        elif ignored is None or _type_of(tool) in ("function", None):
            functions.append(tool)
        else:
            ignored.add(f"tools[{index}]")
    fields = fields | {"tools": functions}
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "custom" and isinstance(choice.get("custom"), dict):
        fields["tool_choice"] = {"type": "function", "function": choice["custom"]}
    if not functions and choice in ("auto", "none"):
        del fields["tools"], fields["tool_choice"]
    return fields


def _type_of(tool: Any) -> Any:
    """Its `type`; None where it has none, or is not even an object. Such a tool is refused by its type."""
    return tool.get("type") if isinstance(tool, dict) else None


def _known(value: Any, kind: Any, path: str, ignored: IgnoredFields) -> Any:
    """`value` without the fields that `kind` does not have, as far down as its types go. null is the same as absent."""
    for choice in _choices(kind):
        if isinstance(value, dict) and isinstance(choice, type) and issubclass(choice, Struct):
            return _known_fields(value, choice, f"{path}." if path else "", ignored)
        if isinstance(value, list) and get_origin(choice) is list:
            (item_kind,) = get_args(choice)
            return [_known(item, item_kind, f"{path}[{index}]", ignored) for index, item in enumerate(value)]
    return value


def _known_fields(value: dict[str, Any], kind: type[Struct], within: str, ignored: IgnoredFields) -> dict[str, Any]:
    hints, known = _hints(kind), {}
    for name, item in value.items():
        if name in hints:
            known[name] = _known(item, hints[name], within + name, ignored)
        elif not kind.__struct_config__.forbid_unknown_fields:
            known[name] = item
        elif not within and name in DECISIVE and item:
            raise InvalidArgument(f"{name} is not supported here", param=name)
        elif item is not None:
            ignored.add(within + name)
    return known


@cache
def _hints(kind: type[Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _check_values(body: bytes) -> None:
    """Refuses millions of numbers: decoding them would hold the interpreter lock for most of a second."""
    if len(body) >= _LARGE and body.count(b",") > _MAX_COMMAS:
        raise InvalidArgument(f"the request body has more than {_MAX_COMMAS:,} commas, so too many values")


def _decode_error(body: bytes, kind: Any, exc: Exception) -> InvalidArgument:
    """What to say about a body that cannot be decoded. Reads it once more, more leniently, to find the field."""
    if len(body) >= _SMALL:
        return InvalidArgument(f"the request body is not valid: {exc}")
    try:
        value = json.loads(body, parse_int=_integer)
        if where := _not_finite(value):
            return InvalidArgument(f"{where} must be a finite number in the range of a 64-bit float", param=where)
        if isinstance(exc, msgspec.ValidationError):
            return _refusal(value, kind, "")
    except RecursionError:
        return InvalidArgument("the request body is nested too deeply")
    except ValueError as error:
        exc = error
    return InvalidArgument(f"the request body is not JSON: {exc}")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _MAX_DIGITS else math.inf


def _refusal(value: Any, kind: Any, path: str) -> InvalidArgument:
    """Why `value` at `path` does not fit `kind`, which it does not: goes down to the first field that is wrong."""
    for choice in _choices(kind):
        if isinstance(value, dict) and isinstance(choice, type) and issubclass(choice, Struct):
            return _field_refusal(value, choice, path)
        if isinstance(value, list) and get_origin(choice) is list:
            (item_kind,) = get_args(choice)
            for index, item in enumerate(value):
                if not _fits(item, item_kind):
                    return _refusal(item, item_kind, f"{path}[{index}]")
        if isinstance(value, dict) and get_origin(choice) is dict:
            for key, item in value.items():
                if not _fits(item, get_args(choice)[1]):
                    return _refusal(item, get_args(choice)[1], f"{path}.{key}")
    try:
        msgspec.convert(value, kind)
        reason = "is not valid"
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        reason = str(exc)
    return InvalidArgument(f"{path or 'the request body'}: {reason[:1].lower()}{reason[1:]}", param=path or None)


def _field_refusal(value: dict[str, Any], kind: type[Struct], path: str) -> InvalidArgument:
    hints, within = _hints(kind), f"{path}." if path else ""
    for name, item in value.items():
        where = within + name
        if name not in hints:
            return InvalidArgument(f"{where} is not supported here", param=where)
        if not _fits(item, hints[name]):
            return _refusal(item, hints[name], where)
    missing = within + next((info.name for info in fields(kind) if info.required and info.name not in value), "")
    return InvalidArgument(f"{missing} is required", param=missing)


def _choices(kind: Any) -> Iterator[Any]:
    """The types that a union or an annotated type stands for."""
    if get_origin(kind) is Annotated:
        yield from _choices(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for choice in get_args(kind):
            yield from _choices(choice)
    else:
        yield kind


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: text with half a surrogate pair
        return False
    return True


def _not_finite(value: Any) -> str | None:
    """The path of a NaN or an infinity, which some clients write although JSON has none."""
    waiting: list[tuple[_Path, Any]] = [((), value)]
    for path, inner in waiting:
        if isinstance(inner, float) and not math.isfinite(inner):
            return _spelled(path)
        if isinstance(inner, dict):
            waiting += [((path, f".{key}"), item) for key, item in inner.items()]
        elif isinstance(inner, list):
            waiting += [((path, f"[{index}]"), item) for index, item in enumerate(inner)]
    return None


_Path = tuple[()] | tuple[Any, str]  # the path above, then the last step: joined only where it is needed


def _spelled(path: _Path) -> str:
    steps = []
    while path:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps)).lstrip(".")
