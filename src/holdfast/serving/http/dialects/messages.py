"""Anthropic's Messages API: its requests as chat completion requests, replies as its messages and events.

Knows JSON values and replies, nothing of sessions. What a request holds that has no meaning here is ignored and named;
what cannot be honoured, such as an image, is refused with the path of the field.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.chat.reply import ReplyEnd, ReplyPiece, TokenUsage
from holdfast.errors import InvalidArgument

Json = dict[str, Any]

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_READ = {*_SAME, "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config"}
_RAW = "_raw_arguments"  # holds the arguments of a call that spell no JSON object
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A request as a chat completion request, and the names of the fields that were ignored."""

    fields: Json
    ignored: tuple[str, ...]


def to_chat(body: Mapping[str, Any]) -> ChatBody:
    """InvalidArgument names the path of what cannot be understood or honoured."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "must be a list with at least one message")
    if type(body.get("max_tokens")) is not int:
        raise _invalid("max_tokens", "must be a whole number")
    chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = [*_system(body.get("system")), *_messages(messages)]
    if stops := body.get("stop_sequences"):
        chat["stop"] = stops
    tools, left_out = _tools(body.get("tools") or [])
    if tools:
        chat["tools"] = tools
        chat |= _tool_choice(body.get("tool_choice"))
    if kind := _inner(body, "thinking").get("type"):
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    if (form := _inner(_inner(body, "output_config"), "format")) and form.get("type") == "json_schema":
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form.get("schema")},
        }
    return ChatBody(chat, (*sorted(set(body) - _READ), *left_out))


def _system(raw: Any) -> Iterator[Json]:
    if raw:
        yield {"role": "system", "content": _text(raw, "system")}


def _messages(raw: Sequence[Any]) -> Iterator[Json]:
    for index, message in enumerate(raw):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _invalid(where, "must be an object")
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield _assistant(content, where)
        elif role == "user":
            yield from _user(content, where)
        elif role == "system":
            yield {"role": "system", "content": _text(content, f"{where}.content")}
        else:
            raise _invalid(f"{where}.role", f"must be user, assistant or system, got {role!r}")


def _user(content: Any, where: str) -> Iterator[Json]:
    """Results of tools first, one message each, then everything else as one message of the user."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts = []
    has_results = False
    for path, block in _blocks(content, f"{where}.content"):
        if block["type"] == "tool_result":
            has_results = True
            result = _text(block.get("content") or "", f"{path}.content")
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result}
        else:
            texts.append(_block_text(block, path))
    if texts or not has_results:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(content: Any, where: str) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for path, block in _blocks(content, f"{where}.content"):
        match block["type"]:
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass  # encrypted for somebody else
            case "tool_use":
                calls.append(_call(block, path))
            case _:
                texts.append(_block_text(block, path))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Mapping[str, Any], where: str) -> Json:
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        raise _invalid(f"{where}.input", "must be an object")
    is_raw = set(given) == {_RAW} and isinstance(given[_RAW], str)
    arguments = given[_RAW] if is_raw else json.dumps(given, ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(content, list):
        raise _invalid(where, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise _invalid(f"{where}[{index}]", "must be a block, an object with a type")
        yield f"{where}[{index}]", block


def _block_text(block: Mapping[str, Any], where: str) -> str:
    if block["type"] != "text":
        raise _invalid(f"{where}.type", f"{block['type']!r} is not supported; only text can be read here")
    if not isinstance(block.get("text"), str):
        raise _invalid(f"{where}.text", "must be a string")
    return str(block["text"])


def _text(raw: Any, where: str) -> str:
    """A string, or the text of a list of text blocks, one below the other."""
    if isinstance(raw, str):
        return raw
    return "\n".join(_block_text(block, path) for path, block in _blocks(raw, where))


def _tools(raw: Any) -> tuple[list[Json], list[str]]:
    """Tools with a schema as functions; tools that Anthropic's servers would run are left out, and named."""
    if not isinstance(raw, list):
        raise _invalid("tools", "must be a list")
    tools, left_out = [], []
    for index, tool in enumerate(raw):
        if not isinstance(tool, Mapping):
            raise _invalid(f"tools[{index}]", "must be an object")
        if "input_schema" not in tool:
            left_out.append(f"tools[{index}] ({tool.get('type')})")
            continue
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return tools, left_out


def _tool_choice(raw: Any) -> Json:
    if raw is None:
        return {}
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise _invalid("tool_choice.type", f"must be auto, any, tool or none, got {kind!r}")
    named = {"type": "function", "function": {"name": raw.get("name")}}
    chosen: Json = {"tool_choice": {"any": "required", "tool": named}.get(kind, kind)}
    return chosen | ({"parallel_tool_calls": False} if raw.get("disable_parallel_tool_use") else {})


def _inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def _invalid(where: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{where} {problem}", param=where)


# Replies


def error_body(message: str, status: int, request_id: str = "") -> Json:
    """Anthropic's error envelope."""
    kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWriter:
    """Writes one message, whole or as events."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def whole(self, endings: Sequence[ReplyEnd]) -> Json:
        (ending,) = endings
        message = ending.message
        blocks: list[Json] = []
        if thought := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"], "citations": None})
        blocks += [_tool_use(call, parse_input(call)) for call in message.get("tool_calls", ())]
        return self._message(blocks, _usage(ending.usage)) | _stop(ending)

    def started(self) -> Json:
        return self._message([], {"input_tokens": 0, "output_tokens": 0})

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


class MessageEvents:
    """The events of one streamed message: blocks open and close as thinking, text and calls come."""

    def __init__(self, writer: MessageWriter) -> None:
        self._writer = writer
        self._num_blocks = 0
        self._open = ""  # the kind of the block that is open
        self._has_begun = False

    def piece(self, piece: ReplyPiece) -> bytes:
        events = self._begin()
        if piece.reasoning:
            events += self._in_block("thinking", {"thinking": "", "signature": ""})
            events += self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.content:
            events += self._in_block("text", {"text": "", "citations": None})
            events += self._delta({"type": "text_delta", "text": piece.content})
        for call in piece.calls:
            events += self._close() + self._start(_tool_use(call, {}))
            text = json.dumps(parse_input(call), ensure_ascii=False)
            events += self._delta({"type": "input_json_delta", "partial_json": text}) + self._close()
        return events

    def end(self, ending: ReplyEnd) -> bytes:
        delta = {"type": "message_delta", "delta": _stop(ending), "usage": _usage(ending.usage)}
        return self._begin() + self._close() + _event(delta) + _event({"type": "message_stop"})

    @staticmethod
    def ping() -> bytes:
        return _event({"type": "ping"})

    @staticmethod
    def error(message: str, status: int) -> bytes:
        return _event(error_body(message, status))

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return _event({"type": "message_start", "message": self._writer.started()})

    def _in_block(self, kind: str, empty: Json) -> bytes:
        return b"" if self._open == kind else self._close() + self._start({"type": kind, **empty})

    def _start(self, block: Json) -> bytes:
        self._open = block["type"]
        self._num_blocks += 1
        return _event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})


def parse_input(call: Mapping[str, Any]) -> Json:
    """A call's arguments as the object that they spell; where they spell none, an object that holds their text."""
    text = call["function"]["arguments"]
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_RAW: text}


def _tool_use(call: Mapping[str, Any], given: Json) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _stop(ending: ReplyEnd) -> Json:
    if isinstance(ending.matched_stop, str) and ending.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.matched_stop}
    return {"stop_reason": _STOP_REASONS[ending.finish_reason], "stop_sequence": None}


def _usage(usage: TokenUsage) -> Json:
    """What was cached is not counted as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(value: Json) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"
