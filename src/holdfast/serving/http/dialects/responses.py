"""OpenAI's Responses API: its requests as chat completion requests, replies as its responses and events.

Knows JSON values and replies, nothing of sessions. Items of one assistant turn (reasoning, message, calls) are one
assistant message here. What has no meaning here is ignored and named; what cannot be honoured, such as an image, is
refused with the path of the field.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.chat.reply import ReplyEnd, ReplyPiece, TokenUsage
from holdfast.errors import InvalidArgument

Json = dict[str, Any]

_SAME = ("model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "stream", "truncation", "metadata")
_ANSWERED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "top_logprobs", "truncation",
             "reasoning", "text", "user", "prompt_cache_key", "safety_identifier", "service_tier", "store",
             "previous_response_id", "max_tool_calls")  # fmt: skip
_READ = {*_SAME, *_ANSWERED, "input", "tools", "tool_choice", "stream_options", "include", "conversation"}
_INPUT = "input"  # the one parameter of a custom tool, which takes any text
_NAMESPACE = "__"  # between a namespace and a tool's name
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")


class ToolName(NamedTuple):
    """What a function's name in the template stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody:
    """A request as a chat completion request, its tools by the names they have in the template, and what was ignored.

    `messages` in `fields` are only those of `input`: an earlier response's come before them.
    """

    fields: Json
    tools: dict[str, ToolName]
    ignored: tuple[str, ...]
    instructions: Json | None  # the system message; it is not part of what a later response continues


def to_chat(body: Mapping[str, Any]) -> ResponsesBody:
    """InvalidArgument names the path of what cannot be understood or honoured."""
    chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    if "top_logprobs" in chat:
        chat["logprobs"] = True
    if (most := body.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    given = body.get("input", [])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise _invalid("input", "must be a string or a list of items")
    left_out: list[str] = []
    chat["messages"] = _messages(items, left_out)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise _invalid("instructions", "must be a string")
    names, functions = _tools(body.get("tools") or [], left_out)
    if functions:
        chat["tools"] = functions
        if (choice := body.get("tool_choice")) is not None:
            chat["tool_choice"] = _tool_choice(choice, names)
    if form := _inner(_inner(body, "text"), "format"):
        chat["response_format"] = _response_format(form)
    if effort := _inner(body, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    ignored = (*sorted(set(body) - _READ), *left_out)
    first = {"role": "system", "content": instructions} if instructions else None
    return ResponsesBody(fields=chat, tools=names, ignored=ignored, instructions=first)


class _Turn:
    """The items of one assistant turn, as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Json] = []

    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        return message | ({"tool_calls": self.calls} if self.calls else {})


def _messages(items: Sequence[Any], left_out: list[str]) -> list[Json]:
    messages: list[Json] = []
    turn: _Turn | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise _invalid(where, "must be an object")
        kind = item.get("type") or "message"
        is_reply = kind == "message" and item.get("role") == "assistant"
        if is_reply or kind in ("reasoning", "function_call", "custom_tool_call"):
            turn = turn or _Turn()
            _take(turn, item, kind, where)
            continue
        if turn is not None:
            messages.append(turn.message())
            turn = None
        if kind == "message":
            messages.append(_message(item, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
        else:
            left_out.append(f"{where} ({kind})")
    return [*messages, turn.message()] if turn is not None else messages


def _take(turn: _Turn, item: Mapping[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        turn.texts.append(_text(item.get("content"), f"{where}.content"))
    elif kind == "reasoning":
        turn.thoughts.append(_text(item.get("content") or item.get("summary") or [], f"{where}.content"))
    else:
        name = str(item.get("name", ""))
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({_INPUT: item.get("input", "")})
        if not isinstance(arguments, str):
            raise _invalid(f"{where}.arguments", "must be a string")
        full = f"{item['namespace']}{_NAMESPACE}{name}" if item.get("namespace") else name
        function = {"name": full, "arguments": arguments}
        turn.calls.append({"id": str(item.get("call_id", "")), "type": "function", "function": function})


def _message(item: Mapping[str, Any], where: str) -> Json:
    role = item.get("role")
    if role not in _ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {role!r}")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _text(raw: Any, where: str) -> str:
    """A string, or the text of a list of text parts."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise _invalid(where, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            raise _invalid(f"{where}[{index}].type", f"{kind!r} is not supported; only text can be read here")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{where}[{index}].text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _tools(raw: Any, left_out: list[str], namespace: str | None = None) -> tuple[dict[str, ToolName], list[Json]]:
    """Function and custom tools, those of namespaces too, as functions; tools that only OpenAI can run are left out."""
    if not isinstance(raw, list):
        raise _invalid("tools", "must be a list")
    names: dict[str, ToolName] = {}
    functions: list[Json] = []
    for index, tool in enumerate(raw):
        if not isinstance(tool, Mapping):
            raise _invalid(f"tools[{index}]", "must be an object")
        kind, name = tool.get("type"), str(tool.get("name", ""))
        if kind == "namespace":
            inner_names, inner = _tools(tool.get("tools") or [], left_out, name)
            names |= inner_names
            functions += inner
        elif kind in ("function", "custom"):
            full = f"{namespace}{_NAMESPACE}{name}" if namespace else name
            names[full] = ToolName(name, namespace, is_custom=kind == "custom")
            functions.append({"type": "function", "function": _function(tool, full, is_custom=kind == "custom")})
        else:
            left_out.append(f"tools[{index}] ({kind})")
    return names, functions


def _function(tool: Mapping[str, Any], name: str, *, is_custom: bool) -> Json:
    function: Json = {"name": name}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if is_custom:
        any_text = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
        return function | {"parameters": any_text}
    return function | ({"parameters": tool["parameters"]} if tool.get("parameters") is not None else {})


def _tool_choice(raw: Any, names: Mapping[str, ToolName]) -> Any:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, Mapping) or raw.get("type") not in ("function", "custom"):
        raise _invalid("tool_choice", "must be none, auto, required, or name a function or custom tool")
    full = next((full for full, tool in names.items() if tool.name == raw.get("name")), raw.get("name"))
    return {"type": "function", "function": {"name": full}}


def _response_format(raw: Mapping[str, Any]) -> Json:
    if raw.get("type") != "json_schema":
        return {"type": raw.get("type")}
    return {"type": "json_schema", "json_schema": {k: raw[k] for k in ("name", "schema", "strict") if k in raw}}


def _inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def _invalid(where: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{where} {problem}", param=where)


# Replies


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseWriter:
    """Writes one response, whole or as events. `request` is the body as it came: a response repeats some of it."""

    model: str
    request: Mapping[str, Any]
    tools: Mapping[str, ToolName]
    id: str = field(default_factory=lambda: _new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, endings: Sequence[ReplyEnd]) -> Json:
        events = ResponseEvents(self)
        (ending,) = endings
        message = ending.message
        events.piece(
            ReplyPiece(
                content=message["content"],
                reasoning=message.get("reasoning_content", ""),
                calls=tuple(message.get("tool_calls", ())),
                tokens=(),
            )
        )
        events.end(ending)
        return events.response

    def body(self, status: str, output: list[Json], **rest: Any) -> Json:
        answered = {name: self.request.get(name) for name in _ANSWERED}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": self.request.get("parallel_tool_calls") is not False,
            "tool_choice": self.request.get("tool_choice") or "auto",
            "tools": self.request.get("tools") or [],
            "usage": None,
            **answered,
            **rest,
        }

    def call_item(self, call: Mapping[str, Any]) -> Json:
        """A call as a function's or a custom tool's, whichever was offered under its name."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        tool = self.tools.get(name, ToolName(name))
        item: Json = {"id": _new_id("ctc" if tool.is_custom else "fc"), "call_id": call["id"], "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        if tool.is_custom:
            return item | {"type": "custom_tool_call", "status": "completed", "input": _custom_input(arguments)}
        return item | {"type": "function_call", "status": "completed", "arguments": arguments}


def _custom_input(arguments: str) -> str:
    """The text for a custom tool: its one argument, or everything where the model did not write it as such."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    is_one = isinstance(value, dict) and set(value) == {_INPUT} and isinstance(value[_INPUT], str)
    return str(value[_INPUT]) if is_one else arguments


class ResponseEvents:
    """The events of one streamed response: items open and close as reasoning, text and calls come."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._number = 0
        self._output: list[Json] = []  # the last one is open while `_kind` is set
        self._kind = ""
        self.response: Json = writer.body("in_progress", [])

    def piece(self, piece: ReplyPiece) -> bytes:
        events = self._begin()
        if piece.reasoning:
            events += self._text(piece.reasoning, "reasoning")
        if piece.content:
            events += self._text(piece.content, "message")
        for call in piece.calls:
            events += self._close() + self._call(self._writer.call_item(call))
        return events

    def end(self, ending: ReplyEnd) -> bytes:
        events = self._begin() + self._close()
        is_whole = ending.finish_reason != "length"
        details = None if is_whole else {"reason": "max_output_tokens"}
        status = "completed" if is_whole else "incomplete"
        if not is_whole and self._output and "status" in self._output[-1]:
            self._output[-1]["status"] = "incomplete"
        self.response = self._writer.body(
            status, self._output, incomplete_details=details, usage=_usage(ending.usage), completed_at=time.time()
        )
        return events + self._event(f"response.{status}", response=self.response)

    def error(self, message: str, code: str, param: str | None) -> bytes:
        self.response = self._writer.body("failed", self._output, error={"code": "server_error", "message": message})
        failed = self._event("error", code=code, message=message, param=param)
        return failed + self._event("response.failed", response=self.response)

    def _begin(self) -> bytes:
        if self._number:
            return b""
        created = self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def _text(self, text: str, kind: str) -> bytes:
        """More text of the reasoning or of the message, in an item of its own."""
        events = b"" if self._kind == kind else self._close() + self._open(kind)
        part = self._output[-1]["content"][0]
        part["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return events + self._part_event(f"{_EVENT[kind]}.delta", delta=text, **logprobs)

    def _open(self, kind: str) -> bytes:
        self._kind = kind
        part: Json = {"type": _PART[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            item: Json = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        else:
            item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
        item["status"] = "in_progress"
        self._output.append(item | {"content": []})
        added = self._item_event("added")
        self._output[-1]["content"] = [part]
        return added + (self._part_event("response.content_part.added", part=part) if kind == "message" else b"")

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        kind, self._kind = self._kind, ""
        item = self._output[-1]
        part = item["content"][0]
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        events = self._part_event(f"{_EVENT[kind]}.done", text=part["text"], **logprobs)
        if kind == "message":
            events += self._part_event("response.content_part.done", part=part)
        item["status"] = "completed"
        return events + self._item_event("done")

    def _call(self, item: Json) -> bytes:
        text_field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "custom_tool_call_input" if text_field == "input" else "function_call_arguments"
        self._output.append(item | {text_field: "", "status": "in_progress"})
        events = self._item_event("added")
        self._output[-1] = item
        where = {"item_id": item["id"], "output_index": len(self._output) - 1}
        events += self._event(f"response.{name}.delta", delta=item[text_field], **where)
        events += self._event(f"response.{name}.done", **{text_field: item[text_field]}, **where)
        return events + self._item_event("done")

    def _item_event(self, what: str) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._output) - 1, item=self._output[-1])

    def _part_event(self, kind: str, **rest: Any) -> bytes:
        where = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(kind, **where, **rest)

    def _event(self, kind: str, **rest: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **rest}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


_PART = {"message": "output_text", "reasoning": "reasoning_text"}
_EVENT = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _usage(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
