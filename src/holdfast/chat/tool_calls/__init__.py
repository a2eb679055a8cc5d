"""Tool calls in the text of a reply, and tools as text. Pure: no HTTP, no ids, no templates rendered."""

import re
from collections.abc import Collection

from holdfast.chat.tool_calls.base import Parsed, ToolCall, ToolCallParser
from holdfast.chat.tool_calls.hermes import OPEN, HermesParser
from holdfast.chat.tool_calls.llama import LlamaParser
from holdfast.chat.tool_calls.prompt import hermes_system_block, render_call, render_result

__all__ = [
    "HermesParser",
    "LlamaParser",
    "Parsed",
    "ToolCall",
    "ToolCallParser",
    "hermes_system_block",
    "parser_for",
    "render_call",
    "render_result",
]

# What Llama 3's templates say of calls: the tag, or the key `"parameters":` in the JSON they ask for.
_LLAMA_STYLE = re.compile(r'python_tag|"parameters"\s*:')


def parser_for(template_source: str, names: Collection[str]) -> ToolCallParser:
    """The parser for what a chat template asks models to write: Llama's where it says so, else Hermes'.

    A template that spells `<tool_call>` is Hermes' whatever else it says; one that knows no tools is too, as our own
    system block (`hermes_system_block`) then offers them.
    """
    is_llama = OPEN not in template_source and _LLAMA_STYLE.search(template_source)
    return LlamaParser(names) if is_llama else HermesParser(names)
