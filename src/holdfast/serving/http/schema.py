"""Request bodies by type. A body that does not fit is refused by the path of the field that is wrong."""

import json
import math
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from holdfast.errors import InvalidArgument

T = TypeVar("T")

MAX_STOPS = 16
_SMALL = 1 << 20  # bytes; larger bodies are not searched for the field that is wrong
_MAX_DIGITS = 400  # of an integer; longer ones are out of range for every field
_Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
_Stops = _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: _Name


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    logit_bias: dict[str, _Number] | None = None
    seed: int | None = None
    stop: _Stops = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=256)] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ChatCompletion(Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: list[Any]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    input_ids: Annotated[list[_TokenId], Meta(min_length=1)] | None = None
    return_meta_info: bool | None = None
    no_stop_trim: Literal[False] | None = None


class Completion(Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None


class RelayedChat(Struct, kw_only=True):
    """What we must know of a chat that an upstream answers; it judges the other fields."""

    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: list[Any] | None = None


class Reward(Struct, kw_only=True, forbid_unknown_fields=True):
    reward: float
    turn: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class WeightVersion(Struct, kw_only=True, forbid_unknown_fields=True):
    weight_version: Annotated[str, Meta(max_length=256)]


class SamplesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    branch: Literal["tip", "all"] = "tip"
    max_seq_len: _Count | None = None
    min_weight_version: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    metadata: dict[str, Any] | None = None
    num_layers: _Count | None = None
    format: Literal["safetensors", "json", "parquet"] = "safetensors"


class NewSession(Struct, kw_only=True, forbid_unknown_fields=True):
    group: str | None = None
    label: Annotated[str, Meta(max_length=1000)] | None = None
    metadata: dict[str, str] | None = None
    pin_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class Fork(Struct, kw_only=True, forbid_unknown_fields=True):
    label: Annotated[str, Meta(max_length=1000)] | None = None


class Purge(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which closed sessions to delete: these ids, or those closed that long ago; else those past retention."""

    session_ids: Annotated[list[str], Meta(min_length=1, max_length=100_000)] | None = None
    older_than_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    dry_run: bool = False


def decode(body: bytes, kind: type[T], *, may_be_empty: bool = False) -> T:
    """The body as `kind`, or InvalidArgument that names the field."""
    if may_be_empty and not body.strip():
        body = b"{}"
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _decode_error(body, kind, exc) from exc
    except RecursionError as exc:
        raise InvalidArgument("the request body is nested too deeply") from exc


def _decode_error(body: bytes, kind: Any, exc: Exception) -> InvalidArgument:
    """What to say about a body that cannot be decoded. Reads it once more, more leniently, to find the field."""
    if len(body) >= _SMALL:
        return InvalidArgument(f"the request body is not valid: {exc}")
    try:
        value = json.loads(body, parse_int=_integer)
        if where := _not_finite(value):
            return InvalidArgument(f"{where} must be a finite number", param=where)
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
    hints, within = get_type_hints(kind, include_extras=True), f"{path}." if path else ""
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
