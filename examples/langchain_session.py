"""LangChain on a session: only the base URL changes.

.venv/bin/pip install langchain-openai httpx      # about 110 MB with dependencies
.venv/bin/holdfast serve                          # in one terminal
.venv/bin/python examples/langchain_session.py    # in another; takes the server's URL as its argument

LangChain sends the whole conversation with every call, as always. The session compares it with what is on record and
computes only what is new.
"""

import sys

import httpx
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


@tool
def population(country: str) -> str:
    """How many people live in a country."""
    return {"France": "68 million", "Italy": "59 million"}.get(country, "unknown")


def main(server: str) -> None:
    session = httpx.post(f"{server}/sessions", json={"label": "langchain"}).json()["session_id"]
    model = ChatOpenAI(
        model="any",
        base_url=f"{server}/sessions/{session}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=48,
    )
    # Tools are part of the start of a session's prompt: bind the same ones in every call and change only the choice.
    calling = model.bind_tools([population], tool_choice="required", strict=True, parallel_tool_calls=False)
    answering = model.bind_tools([population], tool_choice="none", strict=True)

    messages: list[BaseMessage] = [
        SystemMessage("You are a helpful assistant. Use the tools, then answer in one short sentence.")
    ]
    for country in ("France", "Italy"):
        messages.append(HumanMessage(f"How many people live in {country}?"))
        call = calling.invoke(messages)
        messages.append(call)
        for request in call.tool_calls:
            result = population.invoke(request["args"])
            print(f"  population {request['args']} -> {result}")
            messages.append(ToolMessage(result, tool_call_id=request["id"]))
        reply = answering.invoke(messages)
        messages.append(reply)
        usage = reply.usage_metadata
        assert usage is not None
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        print(f"{reply.text}  [{usage['input_tokens'] - cached} new tokens, {cached} cached tokens]")
    httpx.delete(f"{server}/sessions/{session}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
