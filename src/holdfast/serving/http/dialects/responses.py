"""OpenAI's Responses API: its requests as chat completion requests, replies as its responses and events.

Items of one assistant turn (reasoning, message, calls) are one assistant message here.

| in the request | what becomes of it |
|---|---|
| `instructions` | a system message before all others; a later response does not inherit it |
| messages with text | messages; the role `developer` stays what it is |
| `reasoning` items | the reasoning of the assistant message: content, else summary; encrypted content is left out |
| `function_call`, `custom_tool_call` | tool calls; the text of a custom tool is its one argument, `input` |
| `function_call_output`, `custom_tool_call_output` | tool messages |
| items of built-in tools | left out and named in `holdfast-ignored-fields` |
| images, files, `item_reference`, other items | refused by their path |
| tools of type `function` and `custom`, those inside a `namespace` too | functions, `namespace.name` inside one |
| `additional_tools` items | tools of the request, after `tools`; of two with one name the first counts |
| built-in tools (`web_search`, `file_search`, ...) | left out and named in `holdfast-ignored-fields` |
| `tool_choice` | none, auto, required, or one function or custom tool; a built-in tool is refused |
| `parallel_tool_calls`, `temperature`, `top_p`, `metadata`, `truncation`, `recall` | the same there |
| `max_output_tokens` | `max_completion_tokens` |
| `text.format` | `response_format` |
| `reasoning.effort` | `reasoning_effort` |
| `previous_response_id`, `conversation` | the messages on record come before those of `input`; one of the two |
| `store` | false: without a session the response is not kept; on a session every turn is on record |
| `include`, `reasoning.summary`, `text.verbosity`, `stream_options` and fields that only name the caller | no effect |
| `background: true`, `prompt` | refused |
| other fields | left out and named in `holdfast-ignored-fields` |
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from holdfast.chat.messages import ANY_TEXT, CUSTOM_INPUT, Message
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

_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "truncation", "metadata", "recall")
_REPEATED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "truncation",
             "reasoning", "text", "user", "prompt_cache_key", "safety_identifier", "service_tier", "store",
             "previous_response_id")  # fmt: skip
_READ = {*_SAME, *_REPEATED, "input", "tools", "tool_choice", "stream_options", "include", "conversation", "background"}
_INNER = {
    *("role", "content", "type", "text", "refusal", "id", "status", "call_id", "name", "namespace", "arguments"),
    *("input", "output", "summary", "encrypted_content", "annotations", "logprobs", "description", "parameters"),
    *("strict", "tools"),
}  # fields that items, parts and tools may have
_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_NAMESPACE = "."  # between a namespace and a tool's name; names of functions have none
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_ROLES = ("user", "assistant", "system", "developer")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_BUILT_IN = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output", "mcp_list_tools"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_approval_request"),
    *("tool_search_call", "tool_search_output", "mcp_approval_response"),
)

CONVERSATION = "conversation"  # the name among an agent's own ids under which a turn's conversation is recorded
WITH_INSTRUCTIONS = "resp_i"  # begins the id of a response whose first message are instructions; others go on in hex


class ToolName(NamedTuple):
    """What a function's name in the template stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponsesDialect:
    name = "responses"
    names = _NAMES
    id_prefix = "resp_"
    with_matched_stop = False

    def translate(self, body: Any) -> Translated:
        body = as_object(body, "the request body")
        chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
        for name in ("background", "prompt"):
            if body.get(name):
                raise invalid(name, "is not supported here; leave it out")
        if (most := body.get("max_output_tokens")) is not None:
            chat["max_completion_tokens"] = most
        left_out: list[str] = []
        more_tools: list[tuple[str, Any]] = [("tools", body.get("tools"))]
        chat["messages"] = read_items(body.get("input"), "input", left_out, more_tools)
        names: dict[str, ToolName] = {}
        functions: list[Json] = []
        for path, raw in more_tools:
            found, added = _tools(as_list(raw, path), path, left_out)
            functions += [tool for tool in added if path == "tools" or tool["function"]["name"] not in names]
            names = found | names
        if functions:
            chat["tools"] = functions
            if (choice := body.get("tool_choice")) is not None:
                chat["tool_choice"] = _tool_choice(choice, names)
        if form := as_object(as_object(body.get("text"), "text").get("format"), "text.format"):
            chat["response_format"] = _response_format(form)
        if (effort := as_object(body.get("reasoning"), "reasoning").get("effort")) is not None:
            chat["reasoning_effort"] = effort
        previous = as_text(body.get("previous_response_id"), "previous_response_id")
        conversation = _conversation(body.get("conversation"))
        if previous and conversation:
            raise invalid("conversation", "cannot be combined with previous_response_id")
        instructions = as_text(body.get("instructions"), "instructions")
        return Translated(
            fields=chat,
            reply=ResponseReplies(request=body, tools=names, conversation=conversation),
            ignored=ignored_paths(body, _READ, _INNER, left_out),
            previous=previous,
            conversation=conversation,
            instructions={"role": "system", "content": instructions} if instructions else None,
            is_kept=body.get("store") is not False,
        )

    def error(self, envelope: Json, status: int, request_id: str) -> Json:
        return in_own_names(envelope, _NAMES)

    def error_event(self, envelope: Json, status: int) -> bytes:
        return _error_event(envelope, 0)


def _conversation(raw: Any) -> str:
    if isinstance(raw, Mapping):
        return as_text(raw.get("id"), "conversation.id")
    return as_text(raw, "conversation")


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


def read_items(
    raw: Any, where: str, left_out: list[str], more_tools: list[tuple[str, Any]] | None = None
) -> list[Json]:
    """The messages that these items are. What was left out is added to `left_out`, and tools that come as an item to
    `more_tools`, where there may be such items."""
    items = [{"role": "user", "content": raw}] if isinstance(raw, str) else as_list(raw, where)
    messages: list[Json] = []
    turn: _Turn | None = None
    for index, item in enumerate(items):
        path = f"{where}[{index}]"
        if not isinstance(item, Mapping):
            raise invalid(path, "must be an object")
        kind = item.get("type") or "message"
        is_reply = kind == "message" and item.get("role") == "assistant"
        if is_reply or kind == "reasoning" or kind in _CALLS:
            if turn is not None and kind == "reasoning" and (turn.texts or turn.calls):  # reasoning begins a turn
                messages.append(turn.message())
                turn = None
            turn = turn or _Turn()
            _take(turn, item, kind, path)
            continue
        if turn is not None:
            messages.append(turn.message())
            turn = None
        if kind == "message":
            messages.append(_message(item, path))
        elif kind in _OUTPUTS:
            output = _text(item.get("output"), f"{path}.output")
            call_id = as_text(item.get("call_id"), f"{path}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind in _BUILT_IN:
            left_out.append(path)
        elif kind == "additional_tools" and more_tools is not None:
            more_tools.append((f"{path}.tools", item.get("tools")))
        else:
            raise invalid(f"{path}.type", f"{kind!r} is not supported here")
    return [*messages, turn.message()] if turn is not None else messages


def _take(turn: _Turn, item: Mapping[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        turn.texts.append(_text(item.get("content"), f"{where}.content"))
    elif kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        turn.thoughts.append(_text(item.get(name) or [], f"{where}.{name}"))
    else:
        name = _named(item, where)
        if kind == "function_call":
            arguments = as_text(item.get("arguments"), f"{where}.arguments")
        else:
            arguments = json.dumps({CUSTOM_INPUT: as_text(item.get("input"), f"{where}.input")}, ensure_ascii=False)
        namespace = as_text(item.get("namespace"), f"{where}.namespace")
        function = {"name": f"{namespace}{_NAMESPACE}{name}" if namespace else name, "arguments": arguments}
        call_id = as_text(item.get("call_id"), f"{where}.call_id")
        turn.calls.append({"id": call_id, "type": "function", "function": function})


def _message(item: Mapping[str, Any], where: str) -> Json:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {role!r}")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _text(raw: Any, where: str) -> str:
    """A string, or the text of a list of text parts."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise invalid(where, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            raise invalid(f"{where}[{index}].type", f"{kind!r} is not supported; only text can be read here")
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise invalid(f"{where}[{index}].{name}", "must be a string")
        texts.append(part[name])
    return "".join(texts)


def _named(value: Mapping[str, Any], where: str) -> str:
    if not (name := as_text(value.get("name"), f"{where}.name")):
        raise invalid(f"{where}.name", "is required")
    return name


def _tools(
    raw: list[Any], where: str, left_out: list[str], namespace: str | None = None
) -> tuple[dict[str, ToolName], list[Json]]:
    """Function and custom tools, those of namespaces too, as functions; tools that only OpenAI can run are left out."""
    names: dict[str, ToolName] = {}
    functions: list[Json] = []
    for index, tool in enumerate(raw):
        path = f"{where}[{index}]"
        if not isinstance(tool, Mapping):
            raise invalid(path, "must be an object")
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner = as_list(tool.get("tools"), f"{path}.tools")
            inner_names, inner_functions = _tools(inner, f"{path}.tools", left_out, _named(tool, path))
            names |= inner_names
            functions += inner_functions
        elif kind in ("function", "custom"):
            name = _named(tool, path)
            full = f"{namespace}{_NAMESPACE}{name}" if namespace else name
            names[full] = ToolName(name, namespace, is_custom=kind == "custom")
            function: Json = {"name": full}
            if description := as_text(tool.get("description"), f"{path}.description"):
                function["description"] = description
            if kind == "custom":
                function["parameters"] = ANY_TEXT
            elif tool.get("parameters") is not None:
                function["parameters"] = as_object(tool["parameters"], f"{path}.parameters")
            functions.append({"type": "function", "function": function})
        else:
            left_out.append(path)
    return names, functions


def _tool_choice(raw: Any, names: Mapping[str, ToolName]) -> Any:
    if isinstance(raw, str):
        if raw not in ("none", "auto", "required"):
            raise invalid("tool_choice", f"must be none, auto, required, or an object, got {raw!r}")
        return raw
    kind = as_object(raw, "tool_choice").get("type")
    if kind not in ("function", "custom"):
        raise invalid("tool_choice.type", f"must be function or custom, got {kind!r}")
    name = _named(raw, "tool_choice")
    full = next((full for full, tool in names.items() if tool.name == name), name)
    return {"type": "function", "function": {"name": full}}


def _response_format(raw: Mapping[str, Any]) -> Json:
    if raw.get("type") != "json_schema":
        return {"type": raw.get("type")}
    return {"type": "json_schema", "json_schema": {k: raw[k] for k in ("name", "schema", "strict") if k in raw}}


def items_of(messages: Iterable[Message], response_id: str) -> list[Json]:
    """Messages as items, as `input_items` lists them; their ids follow from that of the response."""
    items: list[Json] = []
    for message in messages:
        if message["role"] == "tool":
            item = {"type": "function_call_output", "call_id": message.get("tool_call_id", "")}
            items.append(item | {"output": message["content"], "status": "completed"})
        elif message["role"] == "assistant":
            items += _output_items(message, {}, "")
        else:
            part = {"type": "input_text", "text": message["content"]}
            item = {"type": "message", "role": message["role"], "status": "completed", "content": [part]}
            items.append(item)
    return [{**item, "id": _item_id("item", response_id, index)} for index, item in enumerate(items)]


# Replies


def _item_id(kind: str, response_id: str, index: int) -> str:
    """The same for the same item, however often a response is written."""
    return f"{kind}_{response_id.removeprefix('resp_')}{index:02x}"


def tools_of(chat_tools: Iterable[Mapping[str, Any]]) -> dict[str, ToolName]:
    """The tools on record, by their names in the template: what a namespace was and what a custom tool was shows."""
    names = {}
    for tool in chat_tools:
        full = tool["function"]["name"]
        namespace, _, name = full.rpartition(_NAMESPACE)
        is_custom = tool["function"].get("parameters") == ANY_TEXT
        names[full] = ToolName(name, namespace or None, is_custom=is_custom)
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReplies:
    """`request` is the body as it came: a response repeats some of it."""

    request: Mapping[str, Any]
    tools: Mapping[str, ToolName] = field(default_factory=dict)
    conversation: str = ""
    keep: Keep = keep_nothing

    def keeping(self, keep: Keep) -> ReplyFormat:
        return replace(self, keep=keep)

    def encoder(self, writer: Writer, *, with_usage: bool) -> StreamEncoder:
        return ResponseEvents(self, writer)

    def whole(self, body: bytes, id: str) -> bytes:
        reply = Completion.read(body)
        model = msgspec.json.decode(body).get("model")
        response = self.finished(reply, self.head(id, model, reply.created))
        self.keep(response, reply.message)
        return msgspec.json.encode(response)

    def refusal(self, body: bytes, status: int, request_id: str) -> bytes:
        error = {"message": upstream_message(body), "type": "upstream_error", "code": "upstream_error", "param": None}
        return msgspec.json.encode({"error": error})

    def head(self, id: str, model: Any, created: int) -> Json:
        """A response of which nothing is there yet."""
        request = self.request
        return {
            "id": id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "usage": None,
            "conversation": {"id": self.conversation} if self.conversation else None,
            **{name: request.get(name) for name in _REPEATED},
        }

    def finished(self, reply: Completion, head: Json) -> Json:
        output = _output_items(reply.message, self.tools, head["id"])
        is_whole = reply.finish_reason != "length"
        if not is_whole and output:
            output[-1]["status"] = "incomplete"
        details = None if is_whole else {"reason": "max_output_tokens"}
        status = "completed" if is_whole else "incomplete"
        return head | {"status": status, "output": output, "incomplete_details": details, "usage": _usage(reply)}


def _output_items(message: Message, tools: Mapping[str, ToolName], id: str) -> list[Json]:
    items: list[Json] = []
    if thought := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thought}
        items.append({"id": _item_id("rs", id, 0), "type": "reasoning", "summary": [], "content": [part]})
    if message["content"] or not (items or message.get("tool_calls")):
        items.append(_message_item(id, len(items), message["content"]))
    for call in message.get("tool_calls", ()):
        items.append(_call_item(call, tools, id, len(items)))
    return [item | {"status": "completed"} for item in items]


def _message_item(id: str, index: int, text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": _item_id("msg", id, index), "type": "message", "role": "assistant", "content": [part]}


def _call_item(call: Mapping[str, Any], tools: Mapping[str, ToolName], id: str, index: int) -> Json:
    """A call as a function's or a custom tool's, whichever was offered under its name."""
    full, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = tools.get(full, ToolName(full))
    kind = "ctc" if tool.is_custom else "fc"
    item: Json = {"id": _item_id(kind, id, index), "call_id": call.get("id", ""), "name": tool.name}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.is_custom:
        return item | {"type": "custom_tool_call", "input": _custom_input(arguments)}
    return item | {"type": "function_call", "arguments": arguments}


def _custom_input(arguments: str) -> str:
    """The text for a custom tool: its one argument, or everything where the model did not write it as such."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    is_one = isinstance(value, dict) and set(value) == {CUSTOM_INPUT} and isinstance(value[CUSTOM_INPUT], str)
    return str(value[CUSTOM_INPUT]) if is_one else arguments


_PART_EVENT = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseEvents:
    """The events of one streamed response: items open and close as reasoning and text come, and calls come last."""

    def __init__(self, replies: ResponseReplies, writer: Writer) -> None:
        self._replies = replies
        self._writer = writer
        self._number = 0  # of the next event
        self._head = replies.head(writer.id, writer.model, writer.created)
        self._open: Json | None = None  # the item that is open
        self._num_items = 0
        self._sent = {"reasoning": 0, "message": 0}  # characters

    def encode(self, index: int, item: ReplyPiece | ReplyEnd) -> bytes:
        if isinstance(item, ReplyEnd):
            return self._finish(Completion.of(self._writer.whole([item])))
        return self._text("reasoning", item.reasoning) + self._text("message", item.content)

    def whole(self, body: bytes) -> bytes:
        return self._finish(Completion.read(body))

    def end(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return self._begin() + b": ping\n\n"

    def error(self, envelope: Json, status: int) -> bytes:
        """The event `error`, then the response as failed, which is what some clients wait for."""
        events = self._begin() + _error_event(envelope, self._number)
        self._number += 1
        error = {"code": envelope["error"]["code"] or "server_error", "message": envelope["error"]["message"]}
        return events + self._event("response.failed", response=self._head | {"status": "failed", "error": error})

    def _finish(self, reply: Completion) -> bytes:
        """What was not sent yet, the calls, and the whole response."""
        response = self._replies.finished(reply, self._head)
        message = reply.message
        events = self._begin()
        events += self._text("reasoning", message.get("reasoning_content", "")[self._sent["reasoning"] :])
        events += self._text("message", message["content"][self._sent["message"] :])
        if not self._num_items and not message.get("tool_calls"):
            events += self._start(_message_item(self._head["id"], 0, ""))  # an empty reply is a message without text
        if self._open is not None:
            events += self._close(response["output"][self._num_items - 1]["status"])
        for item in response["output"][self._num_items :]:
            events += self._call(item)
        self._replies.keep(response, message)
        return events + self._event(f"response.{response['status']}", response=response)

    def _begin(self) -> bytes:
        if self._number:
            return b""
        created = self._event("response.created", response=self._head)
        return created + self._event("response.in_progress", response=self._head)

    def _text(self, kind: str, text: str) -> bytes:
        """More text of the reasoning or of the message, in an item of its own."""
        if not text:
            return b""
        self._sent[kind] += len(text)
        events = self._begin()
        if self._open is None or self._open["type"] != kind:
            id = self._head["id"]
            part = {"type": "reasoning_text", "text": ""}
            thought = {"id": _item_id("rs", id, 0), "type": "reasoning", "summary": [], "content": [part]}
            events += self._start(thought if kind == "reasoning" else _message_item(id, self._num_items, ""))
        assert self._open is not None
        self._open["content"][0]["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return events + self._part_event(f"{_PART_EVENT[kind]}.delta", delta=text, **logprobs)

    def _start(self, item: Json) -> bytes:
        closed = self._close()
        self._open = item
        self._num_items += 1
        added = self._item_event("added", item | {"status": "in_progress", "content": []})
        return closed + added + self._part_event("response.content_part.added", part=item["content"][0])

    def _close(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        kind, part = self._open["type"], self._open["content"][0]
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        events = self._part_event(f"{_PART_EVENT[kind]}.done", text=part["text"], **logprobs)
        events += self._part_event("response.content_part.done", part=part)
        events += self._item_event("done", self._open | {"status": status})
        self._open = None
        return events

    def _call(self, item: Json) -> bytes:
        text_field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "custom_tool_call_input" if text_field == "input" else "function_call_arguments"
        self._num_items += 1
        where = {"item_id": item["id"], "output_index": self._num_items - 1}
        events = self._item_event("added", item | {text_field: "", "status": "in_progress"})
        events += self._event(f"response.{name}.delta", delta=item[text_field], **where)
        done: Json = {text_field: item[text_field]} | ({} if text_field == "input" else {"name": item["name"]})
        return events + self._event(f"response.{name}.done", **done, **where) + self._item_event("done", item)

    def _item_event(self, what: str, item: Json) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=self._num_items - 1, item=item)

    def _part_event(self, kind: str, **rest: Any) -> bytes:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": self._num_items - 1, "content_index": 0}
        return self._event(kind, **where, **rest)

    def _event(self, kind: str, **rest: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **rest}
        self._number += 1
        return event(kind, value)


def _error_event(envelope: Json, number: int) -> bytes:
    said = in_own_names(envelope, _NAMES)["error"]
    error = {name: said.get(name) for name in ("code", "message", "param")}
    return event("error", {"type": "error", "sequence_number": number, **error})


def _usage(reply: Completion) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
