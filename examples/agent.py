"""A terminal agent with tools on one session: the history stays on the server, only new tokens are computed.

.venv/bin/holdfast serve --data-dir sessions      # in one terminal
.venv/bin/python examples/agent.py                # in another; ask "What is 12 * 30?" or "Which files are here?"

`--session ID` continues an earlier conversation. A small model seldom calls tools on its own, so the first reply to a
question must be a call (`--tool-choice required`) and the second one must be text. With a larger model, use auto.
"""

import argparse
import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

SYSTEM = "You are a helpful assistant. Use the tools, then answer in one short sentence."
OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
SAMPLING: Any = {"temperature": 0, "max_completion_tokens": 64}


def calculate(left: float, operation: str, right: float) -> str:
    """Compute one operation on two numbers."""
    return f"{OPERATORS[operation](left, right):g}"


def list_files() -> str:
    """List the first five files of the current directory."""
    names = sorted(path.name for path in Path().iterdir() if path.is_file() and not path.name.startswith("."))
    return ", ".join(names[:5]) or "no files"


TOOLS: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "calculate": (
        calculate,
        {
            "left": {"type": "number"},
            "operation": {"type": "string", "enum": list(OPERATORS)},
            "right": {"type": "number"},
        },
    ),
    "list_files": (list_files, {}),
}


def described(name: str) -> Any:
    function, properties = TOOLS[name]
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": function.__doc__, "parameters": parameters}}


def called(name: str, arguments: str) -> str:
    """The result of a tool, or its error, so that the model can try again."""
    try:
        return TOOLS[name][0](**json.loads(arguments))
    except (ArithmeticError, KeyError, TypeError, ValueError) as exc:
        return f"error: {exc}"


def answer(client: OpenAI, messages: list[Any], tool_choice: Any) -> str:
    """One question: tool calls until the model answers in text. Adds everything to `messages`."""
    tools = [described(name) for name in TOOLS]
    while True:
        reply = client.chat.completions.create(
            model="any", messages=messages, tools=tools, tool_choice=tool_choice, parallel_tool_calls=False, **SAMPLING
        )
        message, usage = reply.choices[0].message, reply.usage
        messages.append(message.model_dump(exclude_none=True))
        if usage and usage.prompt_tokens_details:
            cached = usage.prompt_tokens_details.cached_tokens or 0
            print(f"  [{usage.prompt_tokens - cached} new tokens, {cached} cached tokens]", file=sys.stderr)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"
            result = called(call.function.name, call.function.arguments)
            print(f"  {call.function.name} {' '.join(call.function.arguments.split())} -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if tool_choice != "auto":
            tool_choice = "none"  # it has the result, so the next reply must be text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--session", help="continue this session (default: create one)")
    parser.add_argument("--tool-choice", default="required", help="auto, required, or the name of a tool")
    arguments = parser.parse_args()
    choice: Any = arguments.tool_choice
    if choice in TOOLS:
        choice = {"type": "function", "function": {"name": choice}}

    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    session = arguments.session
    if session:
        messages = httpx.get(f"{arguments.server}/sessions/{session}").raise_for_status().json()["messages"]
    else:
        session = httpx.post(f"{arguments.server}/sessions", json={"label": "agent"}).json()["session_id"]
    client = OpenAI(base_url=f"{arguments.server}/sessions/{session}/v1", api_key="none")
    print(f"session {session}; end with Ctrl-D", file=sys.stderr)
    for line in sys.stdin:
        if question := line.strip():
            messages.append({"role": "user", "content": question})
            print(answer(client, messages, choice))


if __name__ == "__main__":
    main()
