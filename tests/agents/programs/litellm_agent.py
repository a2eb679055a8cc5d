"""LiteLLM: `chat` (completion), `messages` (anthropic.messages), `responses`; with `-stream`, streamed."""

import asyncio
import json
import os
from typing import Any

import litellm
from toolbox import DESCRIPTION, INSTRUCTIONS, MAX_STEPS, MODEL, SCHEMA, TASK, VARIANT, bash

is_streamed = VARIANT.endswith("-stream")
function = {"name": "bash", "description": DESCRIPTION, "parameters": SCHEMA}
messages: list[Any] = [{"role": "user", "content": TASK}]


def chat() -> str:
    messages.insert(0, {"role": "system", "content": INSTRUCTIONS})
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "tools": [{"type": "function", "function": function}]}
    for _ in range(MAX_STEPS):
        response = litellm.completion(messages=messages, stream=is_streamed, **options)
        if is_streamed:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        reply = response.choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content or ""
        for call in reply.tool_calls:
            result = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit("too many steps")


async def anthropic_messages() -> str:
    options: dict[str, Any] = {"model": f"anthropic/{MODEL}", "max_tokens": 8000, "system": INSTRUCTIONS}
    options["tools"] = [{"name": "bash", "description": DESCRIPTION, "input_schema": SCHEMA}]
    options["api_base"] = os.environ["ANTHROPIC_BASE_URL"]
    for _ in range(MAX_STEPS):
        reply = await litellm.anthropic.messages.acreate(messages=messages, **options)
        messages.append({"role": "assistant", "content": reply["content"]})
        uses = [block for block in reply["content"] if block["type"] == "tool_use"]
        if not uses:
            return "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        results = [{"type": "tool_result", "tool_use_id": u["id"], "content": bash(**u["input"])} for u in uses]
        messages.append({"role": "user", "content": results})
    raise SystemExit("too many steps")


def responses() -> str:
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "instructions": INSTRUCTIONS}
    options["tools"] = [{"type": "function", **function}]
    items: list[Any] = messages
    for _ in range(MAX_STEPS):
        response = litellm.responses(input=items, stream=is_streamed, **options)
        if is_streamed:
            response = [event for event in response if event.type == "response.completed"][-1].response
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items = [*items, *(item.model_dump(exclude_none=True) for item in response.output)]
        for call in calls:
            result = bash(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise SystemExit("too many steps")


loops = {"chat": chat, "messages": lambda: asyncio.run(anthropic_messages()), "responses": responses}
print(loops[VARIANT.removesuffix("-stream")]())
