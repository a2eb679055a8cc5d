"""Request bodies to calls: decoded by type, then sampling parameters, prompts, tools and grammars.

A body that does not fit its type is refused by the path of the field that is wrong. Fields that its type does not have
are left out and named, or refused as well, as the server is set.
"""

import json
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from holdfast.backends.fields import DECISIVE
from holdfast.chat.chat_model import ChatModel
from holdfast.chat.grammar import Compilation
from holdfast.chat.messages import MAX_IGNORED, IgnoredFields, read_messages
from holdfast.chat.template import RESERVED
from holdfast.chats.events import ChatRequest
from holdfast.chats.turn import check_fits, run_off_loop
from holdfast.errors import InvalidArgument, PayloadTooLarge
from holdfast.generation import Constraint, SamplingParams
from holdfast.serving.http.schema import ChatCompletion, Completion, NamedTool, RelayedChat, Sampling, Tool
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.record import may_overflow

T = TypeVar("T")

_LARGE = 256 << 10  # bytes; the values of larger bodies are counted before they are decoded
_SMALL = 1 << 20  # bytes; larger bodies are not searched for the field that is wrong
_MAX_PLAIN = 8 << 20  # bytes of a body that is no chat
_MAX_COMMAS = 2_000_000
_MAX_DIGITS = 400  # of an integer; longer ones are out of range for every field
_MAX_PROMPTS = 64
_MAX_VARIABLES = 64
_STYLE = frozenset({"reasoning_effort", "verbosity"})  # of the reply; variables of templates that read them
_ANY_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


async def chat_request(
    body: ChatCompletion,
    chat: ChatModel,
    model: ModelInfo,
    *,
    compiled: Callable[[Compilation], Awaitable[Constraint]],
    fields: Mapping[str, Any],
    num_bytes: int = 0,
    as_sglang: bool = False,
) -> ChatRequest:
    """Everything that is asked of one chat turn; `compiled` compiles its grammar."""
    if body.modalities and "text" not in body.modalities:
        raise InvalidArgument("modalities must contain text, which is all that is generated", param="modalities")
    _check_names(body.tools or [])
    tools = _tools(fields, as_sglang=as_sglang)
    callable_tools = _callable(body, tools)
    compilation = await run_off_loop(lambda: _compilation(body, callable_tools, chat), num_bytes)
    return ChatRequest(
        messages=body.messages,
        params=sampling_params(
            body,
            model,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_logprobs=_top_logprobs(body),
            constraint=await compiled(compilation) if compilation else None,
            eos_token_ids=chat.continuation.stop_token_ids,
        ),
        tools=tools,
        callable_tools=callable_tools,
        variables=template_variables(body, chat),
        stop=stop_strings(body),
        may_truncate=body.truncation == "auto",
        body=fields,
        num_bytes=num_bytes,
    )


def relayed_request(
    body: RelayedChat, chat: ChatModel, *, fields: Mapping[str, Any], num_bytes: int, as_sglang: bool = False
) -> ChatRequest:
    """What is asked of a turn that an upstream samples: how, is for it to read in `fields`."""
    return ChatRequest(
        messages=body.messages,
        params=SamplingParams(seed=0),
        tools=_tools(fields, as_sglang=as_sglang),
        variables=template_variables(body, chat),
        may_truncate=True,  # the upstream knows its own window
        body=fields,
        num_bytes=num_bytes,
    )


def sampling_params(
    body: Sampling,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    eos_token_ids: frozenset[int],
    top_logprobs: int = 0,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Sampling parameters with OpenAI's defaults. Without max_tokens a reply may fill the window once."""
    params = SamplingParams(
        seed=_seed(body.seed),
        max_tokens=max_tokens or model.recent,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, model.vocab_size),
        stop_token_ids=frozenset(checked_ids(body.stop_token_ids or [], "stop_token_ids", model)),
        eos_token_ids=eos_token_ids,
        top_logprobs=top_logprobs,
        constraint=constraint,
    )
    params.check_vocabulary(model.vocab_size)
    return params


def prompts(body: Completion, chat: ChatModel, model: ModelInfo) -> list[list[int]]:
    """The prompts of a text completion: one or several, as text or as ids."""
    raw = body.prompt
    many: Sequence[Any] = [raw] if isinstance(raw, str) or all(type(item) is int for item in raw) else raw
    if not raw or len(many) > _MAX_PROMPTS:
        raise InvalidArgument(f"prompt must contain 1 to {_MAX_PROMPTS} prompts, none of them empty", param="prompt")
    texts = [text for text in many if isinstance(text, str)]
    chat.tokenizer.check_size(sum(map(len, texts)), "prompt")
    for text in texts:
        fewest, may_truncate = chat.tokenizer.fewest_tokens(text), body.truncation == "auto"
        check_fits(fewest, model, may_truncate=may_truncate, field="prompt", at_least="at least ")
    return [
        _prompt(item, f"prompt[{index}]" if many is raw else "prompt", chat, model) for index, item in enumerate(many)
    ]


def _prompt(raw: Any, where: str, chat: ChatModel, model: ModelInfo) -> list[int]:
    if isinstance(raw, str):
        ids = chat.tokenizer.encode(raw)
    elif isinstance(raw, list) and all(type(token) is int for token in raw):
        ids = raw
    else:
        raise InvalidArgument(f"{where} must be text or a list of token ids", param=where)
    if not ids:
        raise InvalidArgument(f"{where} is empty", param=where)
    return checked_ids(ids, where, model)


def checked_ids(ids: list[int], where: str, model: ModelInfo) -> list[int]:
    for token in ids:
        if not 0 <= token < model.vocab_size:
            raise InvalidArgument(
                f"{where}: token id {token} is outside the vocabulary of {model.vocab_size}", param=where
            )
    return ids


def stop_strings(body: Sampling) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(63)
    if not -(2**63) <= seed < 2**64:
        raise InvalidArgument("seed must be a 64-bit integer", param="seed")
    return seed % 2**64


def _logit_bias(raw: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidArgument(f"logit_bias.{key} is not a token id of this model", param=f"logit_bias.{key}")
        biases[int(key)] = bias
    return biases


def _top_logprobs(body: ChatCompletion) -> int:
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("top_logprobs requires logprobs: true", param="top_logprobs")
    return body.top_logprobs or 0


def unread_fields(chat: ChatModel) -> frozenset[str]:
    """Known fields of a chat that have no effect on this model, as its template does not read them."""
    return _STYLE - chat.template.variables


def template_variables(body: ChatCompletion | RelayedChat, chat: ChatModel) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if len(given) > _MAX_VARIABLES:
        where = "chat_template_kwargs"
        raise InvalidArgument(f"{where} may have at most {_MAX_VARIABLES} variables, got {len(given)}", param=where)
    for name in given:
        if name in RESERVED or not name.isidentifier():
            where = f"chat_template_kwargs.{name}"
            raise InvalidArgument(f"{where} is not a variable that a request may set", param=where)
    style = {name: getattr(body, name) for name in _STYLE & chat.template.variables}
    return {**chat.variables, **{name: value for name, value in style.items() if isinstance(value, str)}, **given}


def _check_names(raw: Sequence[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(raw):
        if (name := tool.function.name) in names:
            where = f"tools[{index}].function.name"
            raise InvalidArgument(f"{where} repeats {name!r}", param=where)
        names.add(name)


def _tools(fields: Mapping[str, Any], *, as_sglang: bool) -> tuple[dict[str, Any], ...]:
    """The tools as they are rendered: as the client wrote them, or as SGLang and so miles would write them."""
    tools = fields.get("tools") or ()
    return tuple(map(_sglang_tool, tools)) if as_sglang else tuple(tools)


def _sglang_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The order and the defaults of `Tool` and `Function` in SGLang's entrypoints/openai/protocol.py, dumped."""
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return tool
    order = {"description": None, "name": None, "parameters": None, "strict": False}
    return {
        "type": tool.get("type", "function"),
        "function": {name: function.get(name, default) for name, default in order.items()},
    }


def _callable(body: ChatCompletion, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    choice = body.tool_choice
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    if not tools:
        raise InvalidArgument("tool_choice requires tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in tools if tool["function"]["name"] == choice.function.name)
        if not named:
            raise InvalidArgument(
                f"tool_choice.function.name: {choice.function.name!r} is not in tools",
                param="tool_choice.function.name",
            )
        return named
    return tools


def _compilation(
    body: ChatCompletion, callable_tools: tuple[dict[str, Any], ...], chat: ChatModel
) -> Compilation | None:
    must_call = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    kind = body.response_format.type if body.response_format else "text"
    if kind == "text" and not must_call:
        return None
    if must_call and kind != "text":
        raise InvalidArgument("response_format cannot be combined with a forced tool call", param="response_format")
    if must_call:
        is_one = isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False
        return chat.forced_call(callable_tools, is_one=is_one)
    if kind == "json_object":
        return chat.grammars.json_object()
    assert body.response_format is not None
    if body.response_format.json_schema is None or body.response_format.json_schema.schema is None:
        where = "response_format.json_schema.schema"
        raise InvalidArgument(f"{where} is required", param=where)
    return chat.grammars.json_schema(body.response_format.json_schema.schema)


# Bodies by type


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
            body.messages = read_messages(body.messages, ignored=ignored)
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
            functions.append({"type": "function", "function": known | {"parameters": _ANY_TEXT}})
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
