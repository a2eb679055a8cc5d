"""What the scripted model says. The user's prompt has the plan, such as `[[steps 12]]`, so a script needs no state."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.agents.model import Call, Reply, text_of

Json = dict[str, Any]

FINAL = "ALL STEPS ARE DONE"
_PLAN = re.compile(r"\[\[(steps|parallel|subagents|forks|slow|big|text)(?: (\d+))?\]\]")
_SUMMARY_BEGIN = "The user asked for steps, and some of them are done."
_SHELL = re.compile(r"^(bash|shell|exec_command|shell_command|run_shell_command|local_shell)$", re.IGNORECASE)
_SUBAGENT = re.compile(r"^(task|agent|(\w+__|\w+\.)?spawn_agent)$", re.IGNORECASE)
_WAIT = re.compile(r"^(\w+__|\w+\.)?wait(_agent)?$", re.IGNORECASE)
_SUMMARY = re.compile(
    r"(create|provide|generate|write|produce)\b[^.]{0,120}\bsummary|checkpoint compaction|state_snapshot|"
    r"compress the conversation|summary of the conversation",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """`num_done`: replies since the plan was given."""

    kind: str
    number: int
    num_done: int


def plan_of(messages: Sequence[Json]) -> Plan:
    """The last plan that a user gave, or a summary repeats; without one, a text and nothing else."""
    for at in range(len(messages) - 1, -1, -1):
        text = text_of(messages[at])
        is_said = messages[at]["role"] == "user" or _SUMMARY_BEGIN in text
        if is_said and (found := _PLAN.findall(text)):
            kind, number = found[-1]
            return Plan(kind, int(number or 0), sum(m["role"] == "assistant" for m in messages[at + 1 :]))
    return Plan("text", 0, 0)


def by_plan(messages: list[Json], tools: list[Json]) -> Reply:
    """The script for agents that call tools."""
    plan = plan_of(messages)
    if is_summary(messages):
        rest = f"[[steps {max(1, plan.number - plan.num_done)}]]" if plan.kind in ("steps", "big") else "[[text]]"
        tag = "state_snapshot" if "state_snapshot" in text_of(messages[-1]) else "summary"
        return Reply(content=f"<{tag}>{_SUMMARY_BEGIN} What is left: {rest}</{tag}>")
    if not tools:
        return helper_reply(messages)
    return _subagents(plan, messages, tools) if plan.kind in ("subagents", "forks") else _step(plan, tools)


def is_summary(messages: Sequence[Json]) -> bool:
    """Whether the last message asks for a summary that replaces the conversation."""
    last = messages[-1]
    return last["role"] == "user" and not _PLAN.search(text_of(last)) and bool(_SUMMARY.search(text_of(last)))


def is_plan_or_summary(text: str) -> bool:
    """Whether a script looks for something in the text."""
    return bool(_PLAN.search(text) or _SUMMARY.search(text))


def helper_reply(messages: Sequence[Json]) -> Reply:
    """For requests without tools: titles and the like."""
    said = "\n".join(text_of(message) for message in messages)
    if "json" in said.lower() and "title" in said.lower():
        return Reply(content='{"title": "Twelve small steps", "isNewTopic": true}')
    return Reply(content="Twelve small steps" if "title" in said.lower() else FINAL)


def _step(plan: Plan, tools: Sequence[Json]) -> Reply:
    at, shell = plan.num_done, find_tool(tools, _SHELL)
    commands = _commands(plan) if shell else []
    reasoning = f"Step {at} is next." if at % 2 == 0 else ""
    if not shell or not commands:
        return Reply(content=FINAL, reasoning=reasoning, wait_s=plan.number if plan.kind == "slow" else 0)
    content = f"Step {at + 1}." if at % 3 == 0 else ""
    return Reply(content=content, reasoning=reasoning, calls=[_shell(shell, command) for command in commands])


def _commands(plan: Plan) -> list[str]:
    """What the shell is asked to do next, at once; nothing when the plan is done."""
    at, number = plan.num_done, plan.number
    if plan.kind == "steps" and at < number:
        return [f"echo step {at + 1} >> steps.txt"]
    if plan.kind == "big" and at < number:
        return [f"seq {at + 1}0000 {at + 1}3500"]
    if at == 0:
        return {"parallel": [f"echo {n}" for n in range(number)], "slow": ["echo before"]}.get(plan.kind, [])
    return []


def _subagents(plan: Plan, messages: Sequence[Json], tools: Sequence[Json]) -> Reply:
    """Starts them all at once; where they run in the background, waits for one after the other."""
    tool, wait = find_tool(tools, _SUBAGENT), find_tool(tools, _WAIT)
    if tool is None:
        return Reply(content=FINAL)
    kind = "general" if tool["name"] == "task" else "fork" if plan.kind == "forks" else "general-purpose"
    if plan.num_done == 0:
        return Reply(
            content="Two agents can do this.",
            calls=[
                arguments_for(
                    tool,
                    description=f"Count part {n}",
                    prompt=f"Do your part {n}. [[steps 2]]",
                    message=f"Do your part {n}. [[steps 2]]",
                    subagent_type=kind,
                    task_name=f"part_{n}",
                    run_in_background=False,
                )
                for n in range(plan.number)
            ],
        )
    if wait is not None and plan.num_done <= plan.number:
        started = re.findall(r'"agent_id": ?"([^"]+)"', "\n".join(map(text_of, messages)))
        return Reply(calls=[arguments_for(wait, timeout_ms=60_000, targets=[started[plan.num_done - 1]])])
    return Reply(content=FINAL)


def find_tool(tools: Sequence[Json], name: re.Pattern[str]) -> Json | None:
    return next((tool["function"] for tool in tools if name.match(tool["function"]["name"])), None)


def _shell(tool: Json, command: str) -> Call:
    takes_list = tool["parameters"]["properties"].get("command", {}).get("type") == "array"
    spelled = ["bash", "-lc", command] if takes_list else command
    return arguments_for(tool, command=spelled, cmd=command, description="Do a step", is_background=False)


def arguments_for(tool: Json, **wanted: Any) -> Call:
    """A call with those of `wanted` that the tool has, and something for everything else that it requires."""
    schema = tool.get("parameters") or {}
    properties: Json = schema.get("properties") or {}
    arguments = {name: value for name, value in wanted.items() if name in properties}
    for name in schema.get("required") or []:
        arguments.setdefault(name, _filler(properties.get(name) or {}))
    return Call(tool["name"], arguments)


def _filler(schema: Json) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    return {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}.get(str(kind), "x")
