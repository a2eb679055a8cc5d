"""Everything about text that a model brings: tokenizer, template, how it reasons and calls tools, grammars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.chat.answer import AssistantReply
from holdfast.chat.continuation import Continuation
from holdfast.chat.grammar import Grammars
from holdfast.chat.reasoning import ReasoningSplit
from holdfast.chat.rendering import Renderer, Tools
from holdfast.chat.reply import ReplyReader
from holdfast.chat.template import ChatTemplate, load_template
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.chat.tool_calls import LlamaParser, ToolCallParser, parser_for
from holdfast.config import ChatConfig
from holdfast.errors import ConfigError
from holdfast.generation import Constraint
from holdfast.models import ModelSource


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Pure: the same messages give the same tokens, whoever asks."""

    tokenizer: Tokenizer
    template: ChatTemplate
    continuation: Continuation
    grammars: Grammars
    variables: Mapping[str, Any] = field(default_factory=dict)  # defaults for the template

    @property
    def reasons(self) -> bool:
        return "<think>" in self.template.source

    def reply(self, *, stop: Sequence[str] = (), tools: Tools = (), is_reasoning: bool = False) -> AssistantReply:
        """A reader for one reply. `tools`: those that may be called."""
        split = ReasoningSplit(starts_open=is_reasoning) if self.reasons else None
        return AssistantReply(self.tokenizer, ReplyReader(stop, split, self._parser(tools) if tools else None))

    def forced_call(self, tools: Tools, *, is_one: bool) -> Constraint:
        """A grammar of nothing but calls of `tools`, in the form that this model writes them. Blocks."""
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
        return self.grammars.json_schema({"anyOf": calls})

    def _parser(self, tools: Tools) -> ToolCallParser:
        source = self.template.source if self.continuation.abilities.has_tools else ""
        return parser_for(source, [tool["function"]["name"] for tool in tools])

    def text_reply(self, *, stop: Sequence[str] = ()) -> AssistantReply:
        """A reader for plain text: no roles, no reasoning, no calls."""
        return AssistantReply(self.tokenizer, ReplyReader(stop, None, None))


def load_chat(source: ModelSource, config: ChatConfig, vocab_size: int) -> ChatModel:
    """Raises ModelError where the model brings no tokenizer or no template that can be continued."""
    tokenizer = load_tokenizer(source)
    template = (
        _own_template(config.chat_template, tokenizer) if config.chat_template else load_template(source, tokenizer)
    )
    renderer = Renderer(template, tokenizer, allow_control=config.control_tokens == "allow")
    return ChatModel(
        tokenizer, template, Continuation(renderer), Grammars(tokenizer, vocab_size), config.template_variables
    )


def _own_template(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the chat template {path}: {exc}") from exc
    return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
