"""The OpenAI Agents SDK. Variants: an API (`chat`, `responses`), then any of these, joined by `-`: `stream` (streamed),
`previous` (previous_response_id), `conversation` (a stored conversation), `session` (history in a file, which a second
run continues), `handoff` (to a second agent), `team` (agents as tools), `settings` (all that can be set)."""

import asyncio

from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from toolbox import INSTRUCTIONS, MAX_STEPS, MODEL, TASK, VARIANT, bash

from agents import (
    Agent,
    ModelSettings,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

api, *extras = VARIANT.split("-")
set_default_openai_api("responses" if api == "responses" else "chat_completions")
set_tracing_disabled(True)
settings = ModelSettings(include_usage=True)
if "settings" in extras:
    settings = ModelSettings(
        include_usage=True,
        temperature=0.5,
        top_p=0.9,
        max_tokens=1_000_000,
        tool_choice="auto",
        parallel_tool_calls=True,
        truncation="auto",
        reasoning=Reasoning(effort="low", summary="auto"),
        verbosity="low",
        metadata={"run": "one"},
        store=True,
        prompt_cache_retention="24h",
        response_include=["reasoning.encrypted_content"],
    )
shell = function_tool(bash)


def agent(name: str, **options: object) -> Agent:
    text = f"You are {name}. {INSTRUCTIONS}"
    return Agent(name=name, instructions=text, model=MODEL, model_settings=settings, **{"tools": [shell]} | options)


async def main() -> None:
    options: dict[str, object] = {"max_turns": MAX_STEPS}
    starter = agent("main")
    if "handoff" in extras:
        starter = agent("main", handoffs=[agent("writer")])
    if "team" in extras:
        helpers = [agent(name).as_tool(name, "Carries out a part of the task.") for name in ("task_one", "task_two")]
        starter = agent("main", tools=[shell, *helpers])
    if "previous" in extras:
        options["auto_previous_response_id"] = True
    if "conversation" in extras:
        options["conversation_id"] = (await AsyncOpenAI().conversations.create()).id
    if "session" in extras:
        options["session"] = SQLiteSession("one", "session.db")
    if "stream" in extras:
        streamed = Runner.run_streamed(starter, TASK, **options)
        async for _event in streamed.stream_events():
            pass
        print(streamed.final_output)
    else:
        print((await Runner.run(starter, TASK, **options)).final_output)


asyncio.run(main())
