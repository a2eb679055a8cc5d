"""Everything about text that belongs to a model: tokenizer, template, reasoning and tool call formats, grammars."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.chat.abilities import USER
from holdfast.chat.call_formats import FORMATS, CallFormat
from holdfast.chat.continuation import Continuation
from holdfast.chat.grammar import CallFrame, Compilation, Grammars
from holdfast.chat.harmony import TAGS as HARMONY_TAGS
from holdfast.chat.harmony import HarmonyReader
from holdfast.chat.messages import Message
from holdfast.chat.reply import AssistantReply, ReasoningSplit, ReplyReader, Splitter
from holdfast.chat.template import RESERVED, ChatTemplate, Renderer, Tools, load_template, with_controls
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.chat.tool_calls import HermesParser, LlamaParser, control_tag, parser_for
from holdfast.config import ChatConfig
from holdfast.errors import ConfigError, InvalidArgument, TemplateError
from holdfast.generation import Sampled
from holdfast.models import ModelSource

_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "-",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "list": {"type": "array"}}},
    },
}
_PROBE_ARGUMENTS = {"text": 'a "b" \\ \u00e9', "list": [1, {"c": None}]}
_HARMONY = CallFormat(
    "harmony",
    HARMONY_TAGS,
    lambda tools, _: HermesParser(()),  # calls are in the reply's channels, never in its content
    CallFrame(" to=functions.", "<|channel|>commentary json<|message|>", "", quotes_name=False),
)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Pure: the same messages always give the same tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    continuation: Continuation
    grammars: Grammars
    variables: Mapping[str, Any] = field(default_factory=dict)  # defaults for the template
    call_format: CallFormat | None = field(init=False)  # None: the template renders calls in one that is not known

    def __post_init__(self) -> None:
        object.__setattr__(self, "call_format", self._found_format())

    @property
    def reasons(self) -> bool:
        return "<think>" in self.template.source

    def reply(self, *, stop: Sequence[str] = (), tools: Tools = (), is_reasoning: bool = False) -> AssistantReply:
        """A new, empty reply. `tools`: those that may be called."""
        if tools and self.call_format is None:
            raise InvalidArgument(
                "tools: this model's chat template renders tool calls in a format that this server cannot read",
                param="tools",
            )
        return self._reply(self.call_format, stop, tools, is_reasoning)

    def text_reply(self, *, stop: Sequence[str] = ()) -> AssistantReply:
        """A new, empty reply of plain text: no reasoning, no tool calls."""
        return AssistantReply(self.tokenizer, ReplyReader(stop))

    def forced_call(self, tools: Tools, *, is_one: bool) -> Compilation:
        """A grammar that allows only calls of `tools`, in the format that this model writes."""
        if self.call_format is not None and self.call_format.frame is not None:
            return self.grammars.tool_call(tools, is_parallel=not is_one, frame=self.call_format.frame)
        if self.call_format is None or self.call_format.name != "llama":
            raise InvalidArgument(
                "tool_choice: this model writes tool calls in a format that cannot be enforced; use auto",
                param="tool_choice",
            )
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return self.grammars.json_schema({"anyOf": calls}, field="tools")

    def _reply(self, calls: CallFormat | None, stop: Sequence[str], tools: Tools, is_reasoning: bool) -> AssistantReply:
        controls = self.tokenizer.control_tokens
        names = [tool["function"]["name"] for tool in tools]
        parser = calls.parser(tools, self._tag) if calls and tools else None
        shown = calls.tags if calls and (tools or calls is _HARMONY) else ()
        split: Splitter | None = ReasoningSplit(starts_open=is_reasoning) if self.reasons else None
        if calls is _HARMONY:
            split, parser = HarmonyReader(names, self._tag), None
        tags = {controls[text]: control_tag(text) for text in shown if text in controls}
        reader = ReplyReader(stop, split, parser)
        return AssistantReply(
            self.tokenizer, reader, tags=tags, has_short_ids=self.continuation.abilities.wants_short_ids
        )

    def _tag(self, text: str) -> str:
        return control_tag(text) if text in self.tokenizer.control_tokens else text

    def _found_format(self) -> CallFormat | None:
        """The format in which a reply that the template renders is read back as it was."""
        said: Message = {"role": "assistant", "content": "b", "reasoning_content": "a"}
        if self._reads(_HARMONY, said):
            return _HARMONY
        if not self.continuation.abilities.has_tools:
            return FORMATS[0]
        function = {"name": "probe", "arguments": json.dumps(_PROBE_ARGUMENTS, ensure_ascii=False)}
        calling: Message = {"role": "assistant", "content": ""}
        calling["tool_calls"] = [{"id": "call00000", "type": "function", "function": function}]
        for known in FORMATS:
            if self._reads(known, calling):
                return known
        # By what the template tells the model: some render a call in another way than they ask for.
        is_llama = isinstance(parser_for(self.template.source, ()), LlamaParser)
        is_known = is_llama or "<tool_call>" in self.template.source or not self._renders(calling)
        return (
            next(known for known in FORMATS if known.name == ("llama" if is_llama else "hermes")) if is_known else None
        )

    def _renders(self, calling: Message) -> bool:
        try:
            ids = self.continuation.rendered_reply([USER], calling, [_PROBE_TOOL])
        except TemplateError:
            return False
        return "probe" in self.tokenizer.decode(ids)

    def _reads(self, known: CallFormat, message: Message) -> bool:
        try:
            prompt = self.continuation.first([USER], [_PROBE_TOOL])
            ids = self.continuation.rendered_reply([USER], message, [_PROBE_TOOL])
        except TemplateError:
            return False
        reply = self._reply(known, (), [_PROBE_TOOL], prompt.is_reasoning)
        for token in ids:
            reply.push(Sampled(token=token, logprob=0.0, sampling_logprob=0.0))
            if token in self.continuation.stop_token_ids:
                break
        reply.finish()
        read = reply.message
        calls, wanted = read.pop("tool_calls", []), message.get("tool_calls", [])
        has_text = all(read.get(key, "") == message.get(key, "") for key in ("content", "reasoning_content"))
        return has_text and [_called(call) for call in calls] == [_called(call) for call in wanted]


def _called(call: Mapping[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def load_chat(source: ModelSource, config: ChatConfig, vocab_size: int) -> ChatModel:
    """Raises ModelError if the model has no tokenizer, or no template with which a chat can be continued."""
    tokenizer = replace(load_tokenizer(source), max_bytes=config.max_text_mb << 20)
    if config.chat_template:
        template = _read_template(config.chat_template, tokenizer)
    else:
        template = load_template(source, tokenizer)
    for name in RESERVED.intersection(config.template_variables):
        raise ConfigError(f"chat_template_kwargs.{name} is a name that chat templates reserve; use another one")
    return with_template(
        tokenizer,
        template,
        vocab_size=vocab_size,
        allow_control=config.control_tokens == "allow",
        variables=config.template_variables,
    )


def with_template(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    vocab_size: int,
    allow_control: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ChatModel:
    """Raises ModelError if a chat cannot be continued with this template."""
    tokenizer = with_controls(tokenizer, template)
    continuation = Continuation(Renderer(template, tokenizer, allow_control=allow_control))
    return ChatModel(tokenizer, template, continuation, Grammars(tokenizer, vocab_size), variables or {})


def _read_template(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the chat template {path}: {exc}") from exc
    return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
