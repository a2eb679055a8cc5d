"""The `anthropic` package: `runner` (its tool runner), `runner-stream`, `loop` (messages.stream, results by hand)."""

from typing import Any

import anthropic
from toolbox import DESCRIPTION, INSTRUCTIONS, MAX_STEPS, MODEL, SCHEMA, TASK, VARIANT, bash

client = anthropic.Anthropic()
messages: list[Any] = [{"role": "user", "content": TASK}]
options: dict[str, Any] = {"model": MODEL, "max_tokens": 32_000 if "loop" in VARIANT else 8_000, "system": INSTRUCTIONS}


def runner() -> Any:
    tools = [anthropic.beta_tool(bash)]
    is_streamed = VARIANT.endswith("-stream")
    turns = client.beta.messages.tool_runner(messages=messages, tools=tools, stream=is_streamed, **options)
    for turn in turns:
        last = turn.get_final_message() if is_streamed else turn
    return last


def loop() -> Any:
    tools = [{"name": "bash", "description": DESCRIPTION, "input_schema": SCHEMA}]
    for _ in range(MAX_STEPS):
        with client.messages.stream(messages=messages, tools=tools, **options) as stream:
            reply = stream.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return reply
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": bash(**use.input)} for use in uses]
        messages.append({"role": "user", "content": results})
    raise SystemExit("too many steps")


reply = loop() if VARIANT == "loop" else runner()
print("".join(block.text for block in reply.content if block.type == "text"))
