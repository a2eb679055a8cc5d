"""Everything about text that belongs to a model: tokenizer, template, reasoning and tool call formats, grammars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.chat.continuation import Continuation
from holdfast.chat.grammar import Compilation, Grammars
from holdfast.chat.reply import AssistantReply, ReasoningSplit, ReplyReader
from holdfast.chat.template import RESERVED, ChatTemplate, Renderer, Tools, load_template, with_controls
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.chat.tool_calls import LlamaParser, ToolCallParser, parser_for
from holdfast.config import ChatConfig
from holdfast.errors import ConfigError
from holdfast.models import ModelSource


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Pure: the same messages always give the same tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    continuation: Continuation
    grammars: Grammars
    variables: Mapping[str, Any] = field(default_factory=dict)  # defaults for the template

    @property
    def reasons(self) -> bool:
        return "<think>" in self.template.source

    def reply(self, *, stop: Sequence[str] = (), tools: Tools = (), is_reasoning: bool = False) -> AssistantReply:
        """A new, empty reply. `tools`: those that may be called."""
        split = ReasoningSplit(starts_open=is_reasoning) if self.reasons else None
        return AssistantReply(self.tokenizer, ReplyReader(stop, split, self._parser(tools) if tools else None))

    def text_reply(self, *, stop: Sequence[str] = ()) -> AssistantReply:
        """A new, empty reply of plain text: no reasoning, no tool calls."""
        return AssistantReply(self.tokenizer, ReplyReader(stop))

    def forced_call(self, tools: Tools, *, is_one: bool) -> Compilation:
        """A grammar that allows only calls of `tools`, in the format that this model writes."""
        if not isinstance(self._parser(tools), LlamaParser):
            return self.grammars.tool_call(tools, is_parallel=not is_one)
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

    def _parser(self, tools: Tools) -> ToolCallParser:
        source = self.template.source if self.continuation.abilities.has_tools else ""
        return parser_for(source, [tool["function"]["name"] for tool in tools])


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
