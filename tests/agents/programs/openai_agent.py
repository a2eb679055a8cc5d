"""A tool loop on the `openai` package: `chat`, `chat-stream` (its helper), `responses` (the whole history),
`responses-stream`, `previous` (previous_response_id), `conversation`."""

import json
from typing import Any

import openai
from toolbox import DESCRIPTION, INSTRUCTIONS, MAX_STEPS, MODEL, SCHEMA, TASK, VARIANT, bash

client = openai.OpenAI()
function = {"name": "bash", "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}


def chat() -> str:
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": TASK}]
    options: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": function}]}
    for _ in range(MAX_STEPS):
        if VARIANT.endswith("-stream"):
            with client.chat.completions.stream(messages=messages, **options) as stream:
                reply = stream.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(messages=messages, **options).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content or ""
        for call in reply.tool_calls:
            result = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit("too many steps")


def responses() -> str:
    options: dict[str, Any] = {
        "model": MODEL,
        "tools": [{"type": "function", **function}],
        "instructions": INSTRUCTIONS,
    }
    items: list[Any] = [{"role": "user", "content": TASK}]
    if VARIANT == "conversation":
        options["conversation"] = client.conversations.create().id
    for _ in range(MAX_STEPS):
        if VARIANT.endswith("-stream"):
            with client.responses.stream(input=items, **options) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **options)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        if VARIANT == "previous":
            options["previous_response_id"] = response.id
        items = [] if VARIANT in ("previous", "conversation") else [*items, *response.output]
        for call in calls:
            result = bash(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise SystemExit("too many steps")


print(chat() if VARIANT.startswith("chat") else responses())
