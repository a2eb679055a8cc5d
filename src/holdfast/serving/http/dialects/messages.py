"""Anthropic's Messages API: its requests as chat completion requests, replies as its messages and events.

| in the request | what becomes of it |
|---|---|
| `system`, a string or text blocks | a system message, blocks one below the other |
| text blocks of a user message | one message, blocks one below the other |
| `tool_result` blocks | a tool message each, before the text of the same message |
| `tool_reference` blocks | the name of the tool as text; the tool itself is among `tools`, deferred or not |
| `thinking`, `tool_use` blocks | reasoning and tool calls of the assistant message; `redacted_thinking` is left out |
| tools with an `input_schema` | functions |
| tools that Anthropic's servers would run | left out and named in `holdfast-ignored-fields` |
| `tool_choice` | the same choice of chat completions; `disable_parallel_tool_use` is `parallel_tool_calls: false` |
| `thinking` | the template variable `enable_thinking` |
| `output_config` | `format` restricts the reply to a schema; `effort` is `reasoning_effort` |
| `thread` of type `continue` | system, tools and messages on record up to `previous_message_id` come first |
| `recall` | the same field of chat completions |
| `compaction` | refused: the reply would have to be a summary and nothing else |
| images, documents and other blocks | refused by their path |
| other fields of the request | left out and named in `holdfast-ignored-fields` |
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.chat.reply import ReplyEnd, ReplyPiece
from holdfast.serving.http.dialects.base import (
    Completion,
    Json,
    Keep,
    ReplyFormat,
    StreamEncoder,
    Translated,
    as_list,
    as_object,
    as_text,
    event,
    ignored_paths,
    in_own_names,
    invalid,
    keep_nothing,
    upstream_message,
)
from holdfast.serving.http.render import Writer

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "recall")
_READ = {*_SAME, "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config", "thread"}
_INNER = {
    *("role", "content", "type", "text", "thinking", "signature", "data", "id", "name", "input", "tool_use_id"),
    "tool_name",
    *("description", "input_schema"),
}  # fields that messages, blocks and tools may have
_RAW = "_raw_arguments"  # holds the arguments of a call that spell no JSON object
_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect:
    name = "messages"
    names = _NAMES
    id_prefix = "msg_"
    with_matched_stop = True

    def translate(self, body: Any) -> Translated:
        body = as_object(body, "the request body")
        if body.get("compaction"):
            raise invalid("compaction", "is not supported here; leave it out")
        thread, previous = _thread(body)
        chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
        chat["messages"] = [*_system(body.get("system")), *_messages(as_list(body.get("messages"), "messages"))]
        if stops := as_list(body.get("stop_sequences"), "stop_sequences"):
            chat["stop"] = stops
        tools, left_out = _tools(as_list(body.get("tools"), "tools"))
        if tools:
            chat["tools"] = tools
        if tools or previous:
            chat |= _tool_choice(as_object(body.get("tool_choice"), "tool_choice"))
        if kind := as_object(body.get("thinking"), "thinking").get("type"):
            chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
        chat |= _output(as_object(body.get("output_config"), "output_config"))
        ignored = ignored_paths(body, _READ, _INNER, left_out)
        return Translated(
            fields=chat,
            reply=MessageReplies(),
            ignored=ignored,
            previous=previous,
            has_their_tools=bool(previous),
            is_kept=bool(thread),
        )

    def error(self, envelope: Json, status: int, request_id: str) -> Json:
        body = error_body(in_own_names(envelope, _NAMES)["error"]["message"], status, request_id)
        if envelope["error"]["code"] == "response_not_found":  # the package sends the whole conversation then
            body["error"]["details"] = {"error_code": "thread_not_found"}
        return body

    def error_event(self, envelope: Json, status: int) -> bytes:
        return event("error", self.error(envelope, status, ""))


def _thread(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The thread that is created or continued, and the message that is continued."""
    thread = as_object(body.get("thread"), "thread")
    if not thread or thread.get("type") == "create":
        return thread, ""
    if thread.get("type") != "continue":
        raise invalid("thread.type", f"must be create or continue, got {thread.get('type')!r}")
    if not (previous := as_text(thread.get("previous_message_id"), "thread.previous_message_id")):
        raise invalid("thread.previous_message_id", "is required")
    for name in ("system", "tools"):
        if body.get(name):
            raise invalid(name, "must be left out where a thread continues, which has its own")
    return thread, previous


def _system(raw: Any) -> Iterator[Json]:
    if raw is not None and (text := _text(raw, "system")):
        yield {"role": "system", "content": text}


def _messages(raw: list[Any]) -> Iterator[Json]:
    if not raw:
        raise invalid("messages", "must contain at least one message")
    for index, message in enumerate(raw):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise invalid(where, "must be an object")
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield _assistant(content, where)
        elif role == "user":
            yield from _user(content, where)
        elif role == "system":
            yield {"role": "system", "content": _text(content, f"{where}.content")}
        else:
            raise invalid(f"{where}.role", f"must be user, assistant or system, got {role!r}")


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
            tool_use_id = as_text(block.get("tool_use_id"), f"{path}.tool_use_id")
            yield {"role": "tool", "tool_call_id": tool_use_id, "content": result}
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
                thoughts.append(as_text(block.get("thinking"), f"{path}.thinking"))
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
    given = as_object(block.get("input"), f"{where}.input")
    is_raw = set(given) == {_RAW} and isinstance(given[_RAW], str)
    arguments = given[_RAW] if is_raw else json.dumps(given, ensure_ascii=False)
    function = {"name": _named(block, where), "arguments": arguments}
    return {"id": as_text(block.get("id"), f"{where}.id"), "type": "function", "function": function}


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise invalid(f"{where}[{index}]", "must be a block, an object with a type")
        yield f"{where}[{index}]", block


def _block_text(block: Mapping[str, Any], where: str) -> str:
    if block["type"] == "tool_reference":  # a tool that the client has found, and now offers with the others
        return as_text(block.get("tool_name"), f"{where}.tool_name")
    if block["type"] != "text":
        raise invalid(f"{where}.type", f"{block['type']!r} is not supported; only text can be read here")
    if not isinstance(block.get("text"), str):
        raise invalid(f"{where}.text", "must be a string")
    return str(block["text"])


def _text(raw: Any, where: str) -> str:
    """A string, or the text of a list of text blocks, one below the other."""
    if isinstance(raw, str):
        return raw
    return "\n".join(_block_text(block, path) for path, block in _blocks(raw, where))


def _tools(raw: list[Any]) -> tuple[list[Json], list[str]]:
    """Tools with a schema as functions; tools that Anthropic's servers would run are left out, and named."""
    tools, left_out = [], []
    for index, tool in enumerate(raw):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise invalid(where, "must be an object")
        if tool.get("type") not in (None, "custom"):
            left_out.append(where)
            continue
        function: Json = {"name": _named(tool, where)}
        if description := as_text(tool.get("description"), f"{where}.description"):
            function["description"] = description
        function["parameters"] = as_object(tool.get("input_schema"), f"{where}.input_schema")
        tools.append({"type": "function", "function": function})
    return tools, left_out


def _named(value: Mapping[str, Any], where: str) -> str:
    if not (name := as_text(value.get("name"), f"{where}.name")):
        raise invalid(f"{where}.name", "is required")
    return name


def _tool_choice(raw: Mapping[str, Any]) -> Json:
    if not raw:
        return {}
    kind = raw.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"must be auto, any, tool or none, got {kind!r}")
    choice: Any = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        choice = {"type": "function", "function": {"name": _named(raw, "tool_choice")}}
    return {"tool_choice": choice} | ({"parallel_tool_calls": False} if raw.get("disable_parallel_tool_use") else {})


def _output(raw: Mapping[str, Any]) -> Json:
    chat: Json = {}
    if effort := as_text(raw.get("effort"), "output_config.effort"):
        chat["reasoning_effort"] = effort
    if form := as_object(raw.get("format"), "output_config.format"):
        if form.get("type") != "json_schema":
            raise invalid("output_config.format.type", f"must be json_schema, got {form.get('type')!r}")
        schema = as_object(form.get("schema"), "output_config.format.schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return chat


# Replies


def error_body(message: str, status: int, request_id: str) -> Json:
    kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}


@dataclass(frozen=True, slots=True)
class MessageReplies:
    keep: Keep = keep_nothing

    def keeping(self, keep: Keep) -> ReplyFormat:
        return MessageReplies(keep)

    def encoder(self, writer: Writer, *, with_usage: bool) -> StreamEncoder:
        return MessageEvents(writer, self.keep)

    def whole(self, body: bytes, id: str) -> bytes:
        reply = Completion.read(body)
        message = reply.message
        blocks: list[Json] = []
        if thought := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"], "citations": None})
        blocks += [_tool_use(call, parse_input(call)) for call in message.get("tool_calls", ())]
        model = msgspec.json.decode(body).get("model")
        self.keep({"id": id, "object": "message"}, message)
        return msgspec.json.encode(_message(id, model, blocks, _usage(reply)) | _stop(reply))

    def refusal(self, body: bytes, status: int, request_id: str) -> bytes:
        return msgspec.json.encode(error_body(upstream_message(body), status, request_id))


def _message(id: str, model: Any, content: list[Json], usage: Json) -> Json:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


class MessageEvents:
    """The events of one streamed message: blocks open and close as thinking and text come, and calls come last."""

    def __init__(self, writer: Writer, keep: Keep) -> None:
        self._writer = writer
        self._keep = keep
        self._num_blocks = 0
        self._open = ""  # the kind of the block that is open
        self._sent = {"thinking": 0, "text": 0}  # characters
        self._has_begun = False

    def encode(self, index: int, item: ReplyPiece | ReplyEnd) -> bytes:
        if isinstance(item, ReplyEnd):
            return self._finish(Completion.of(self._writer.whole([item])))
        return self._text("thinking", item.reasoning) + self._text("text", item.content)

    def whole(self, body: bytes) -> bytes:
        return self._finish(Completion.read(body))

    def end(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return self._begin() + event("ping", {"type": "ping"})

    def error(self, envelope: Json, status: int) -> bytes:
        return MessagesDialect().error_event(envelope, status)

    def _finish(self, reply: Completion) -> bytes:
        """What was not sent yet, the calls, and why the message ends."""
        message = reply.message
        events = self._begin() + self._text("thinking", message.get("reasoning_content", "")[self._sent["thinking"] :])
        events += self._text("text", message["content"][self._sent["text"] :])
        for call in message.get("tool_calls", ()):
            given = msgspec.json.encode(parse_input(call)).decode()
            events += self._start(_tool_use(call, {}))
            events += self._delta({"type": "input_json_delta", "partial_json": given})
        self._keep({"id": self._writer.id, "object": "message"}, message)
        delta = {"type": "message_delta", "delta": _stop(reply), "usage": _usage(reply)}
        return events + self._close() + event("message_delta", delta) + event("message_stop", {"type": "message_stop"})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        started = _message(self._writer.id, self._writer.model, [], {"input_tokens": 0, "output_tokens": 0})
        return event("message_start", {"type": "message_start", "message": started})

    def _text(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        self._sent[kind] += len(text)
        empty: Json = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": "", "citations": None}
        events = self._begin() + (b"" if self._open == kind else self._start({"type": kind, **empty}))
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: Json) -> bytes:
        closed = self._close()
        self._open = block["type"]
        self._num_blocks += 1
        started = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}
        return closed + event("content_block_start", started)

    def _delta(self, delta: Json) -> bytes:
        value = {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
        return event("content_block_delta", value)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return event("content_block_stop", {"type": "content_block_stop", "index": self._num_blocks - 1})


def parse_input(call: Mapping[str, Any]) -> Json:
    """The object that a call's arguments spell; where JSON cannot carry that, an object that holds their text."""
    text = call["function"]["arguments"]
    try:
        value = json.loads(text or "{}")
        if isinstance(value, dict) and msgspec.json.decode(msgspec.json.encode(value)) == value:
            return value
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):  # UnicodeError is a ValueError
        pass
    return {_RAW: text}


def _tool_use(call: Mapping[str, Any], given: Json) -> Json:
    return {"type": "tool_use", "id": call.get("id", ""), "name": call["function"]["name"], "input": given}


def _stop(reply: Completion) -> Json:
    if reply.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    is_call = "tool_calls" in reply.message and reply.finish_reason != "length"
    reason = _STOP_REASONS.get("tool_calls" if is_call else reply.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(reply: Completion) -> Json:
    """What was cached is not counted as input."""
    return {
        "input_tokens": max(0, reply.prompt_tokens - reply.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
    }
