"""What the scripted model says to agents that end, call helpers or edit files in a way of their own."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tests.agents.model import Call, Reply
from tests.agents.scripts import FINAL, arguments_for, by_plan, find_tool, helper_reply, is_summary, plan_of, text_of

Json = dict[str, Any]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_BASH: Json = {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}
_HELPER = re.compile(r"^task_\w+$")
_HANDOFF = re.compile(r"^transfer_to_\w+$")


def with_helpers(messages: list[Json], tools: list[Json]) -> Reply:
    """For frameworks: helpers are tools named task_..., a handoff is a tool too, and so may be the final answer."""
    plan, handoff = plan_of(messages), find_tool(tools, _HANDOFF)
    helpers = [tool["function"] for tool in tools if _HELPER.match(tool["function"]["name"])]
    if plan.kind == "subagents" and helpers and plan.num_done == 0:
        part = "Do your part. [[steps 2]]"
        calls = [arguments_for(tool, input=part, task=part) for tool in helpers[: plan.number]]
        return Reply(content="Two agents can do this.", calls=calls)
    if handoff and plan.num_done == 2:
        return Reply(calls=[arguments_for(handoff)])
    reply = by_plan(messages, tools)
    if not reply.calls and (final := find_tool(tools, re.compile("^final_answer$"))):
        return dataclasses.replace(reply, content="", calls=[arguments_for(final, answer=FINAL)])
    return reply


def as_python(messages: list[Json], tools: list[Json]) -> Reply:
    """For smolagents' CodeAgent: what would be calls is Python code, and the final answer is a call as well."""
    if "<code>" not in text_of(messages[0]):
        return Reply(content="First one thing, then the next.")
    reply = with_helpers(messages, [{"function": _BASH}, *_managed(messages)])
    lines = [f"print({call.name}({_spelled(call)}))" for call in reply.calls] or [f'final_answer("{FINAL}")']
    code = "\n".join(lines)
    return Reply(content=f"Thought: the next step.\n<code>\n{code}\n</code>", wait_s=reply.wait_s)


def until_submitted(messages: list[Json], tools: list[Json]) -> Reply:
    """For mini-swe-agent, which ends with a command; commands are calls, or blocks of text where it has no tools."""
    reply = by_plan(messages, tools or [{"function": _BASH}])
    calls = reply.calls or [Call("bash", {"command": SUBMIT})]
    if tools:
        return dataclasses.replace(reply, calls=calls)
    command = " && ".join(str(call.arguments["command"]) for call in calls)
    content = f"THOUGHT: the next step.\n\n```mswea_bash_command\n{command}\n```"
    return Reply(content=content, wait_s=reply.wait_s)


def as_edits(messages: list[Json], tools: list[Json]) -> Reply:
    """For aider: `[[text N]]` adds line N to notes.txt, in the edit format that the system prompt asks for."""
    plan, system = plan_of(messages), "\n".join(text_of(m) for m in messages if m["role"] == "system")
    if plan.kind == "slow":
        return Reply(content=FINAL, wait_s=plan.number)
    if "SEARCH/REPLACE" in system:
        before = f"line {plan.number - 1}\n" if plan.number > 1 else ""
        edit = f"<<<<<<< SEARCH\n{before}=======\n{before}line {plan.number}\n>>>>>>> REPLACE"
        return Reply(content=f"{FINAL}\n\nnotes.txt\n```\n{edit}\n```")
    if "file listing" in system:
        lines = "\n".join(f"line {n}" for n in range(1, plan.number + 1))
        return Reply(content=f"{FINAL}\n\nnotes.txt\n```\n{lines}\n```")
    if is_summary(messages) or "summarize" in system.lower():
        return Reply(content="I asked you to add lines to notes.txt, and you did.")
    return helper_reply(messages)


def _managed(messages: Sequence[Json]) -> list[Json]:
    """The helpers that a CodeAgent's system prompt names."""
    names = dict.fromkeys(re.findall(r"def (task_\w+)\(", text_of(messages[0])))
    return [{"function": {"name": name, "parameters": {"properties": {"task": {}}}}} for name in names]


def _spelled(call: Call) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
