"""Tools as plain text, for models whose chat template knows none.

The words are those that Hermes and Qwen models are trained on, so `HermesParser` reads what such a prompt asks for:
the system block offers the tools, an assistant's call is JSON between `<tool_call>` tags, and a tool's answer stands
between `<tool_response>` tags in a message of a role that the template does know.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.chat.tool_calls.hermes import CLOSE, OPEN
from holdfast.chat.tool_calls.json_text import is_object

_SYSTEM_BLOCK = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {open}{close} XML tags:
{open}
{{"name": <function-name>, "arguments": <args-json-object>}}
{close}"""


def hermes_system_block(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that offers `tools` (as OpenAI's requests have them) and says how to call them; "" for no tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _SYSTEM_BLOCK.format(tools=lines, open=OPEN, close=CLOSE) if tools else ""


def render_call(name: str, arguments: str) -> str:
    """An assistant's call as text. Arguments that are no JSON object go in as a JSON string; blank ones are `{}`."""
    spelled = arguments.strip() or "{}"
    if not is_object(spelled):
        spelled = json.dumps(arguments, ensure_ascii=False)
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {spelled}}}\n{CLOSE}'


def render_result(content: str) -> str:
    """A tool's answer as text."""
    return f"<tool_response>\n{content}\n</tool_response>"
