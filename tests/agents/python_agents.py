"""Agents from PyPI: command-line programs, and frameworks and packages by the small programs in programs/.

Their scenarios are VARIANT:SCENARIO, where the variant says which API, which kind of agent or which edit format.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.agents.agent import Agent, Command, Place
from tests.agents.model import Script
from tests.agents.npm_agents import prompts_for, with_run
from tests.agents.scripts import FINAL
from tests.agents.text_scripts import as_edits, as_python, until_submitted, with_helpers

PROGRAMS = Path(__file__).parent / "programs"
NOTES = "notes.txt"
STEPS = ("steps.txt", "".join(f"step {n}\n" for n in range(1, 13)))


def _split(place: Place) -> tuple[str, Place]:
    variant, _, scenario = place.scenario.partition(":")
    return variant, dataclasses.replace(place, scenario=scenario)


def _env(place: Place) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": place.v1,
        "OPENAI_API_BASE": place.v1,  # aider's LiteLLM
        "OPENAI_API_KEY": place.key,
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": place.key,
        "OPENAI_MODEL": place.model,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _program(name: str) -> Callable[[Place], Sequence[Command]]:
    def commands(place: Place) -> Sequence[Command]:
        variant, inner = _split(place)
        program = ["python", str(PROGRAMS / f"{name}.py"), variant]
        if inner.scenario == "run":
            return with_run(inner, *program, HF_HUB_OFFLINE="1")
        in_work = name != "verifiers_agent"  # which has a directory of its own
        is_alone = not variant.endswith(("-team", "-handoff", "-plan"))  # others take steps, too
        writes = STEPS if in_work and is_alone and inner.scenario == "steps" else None
        return [
            Command(argv=[*program, prompt], env=_env(place), says=FINAL, writes=writes)
            for prompt in prompts_for(inner)
        ]

    return commands


def _verifiers(place: Place) -> Sequence[Command]:
    """Its own agent installs packages with uv: from an index of the wheels that were installed with it."""
    index = place.home / "index"
    for wheel in sorted((place.prefix / "wheels").glob("*.whl")):
        page = index / wheel.name.partition("-")[0].replace("_", "-").lower() / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<a href="{wheel.as_uri()}">{wheel.name}</a>')
    commands = _program("verifiers_agent")(place)
    return [dataclasses.replace(one, env={**one.env, "UV_DEFAULT_INDEX": index.as_uri()}) for one in commands]


def _mini(place: Place) -> Sequence[Command]:
    variant, inner = _split(place)
    env = _env(place) | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    options = {"chat": [], "responses": ["--model-class", "litellm_response"], "text": ["-c", "mini_textbased.yaml"]}
    if variant == "text":
        options["text"] += ["--model-class", "litellm_textbased"]
    base = ["mini", "--yolo", "--exit-immediately", "--cost-limit", "0"]
    if inner.scenario == "run":
        return with_run(inner, *base, *options[variant], "--task")
    base += ["--model", f"openai/{place.model}"]
    writes = STEPS if inner.scenario == "steps" else None
    return [
        Command(argv=[*base, *options[variant], "--task", task], env=env, writes=writes) for task in prompts_for(inner)
    ]


def _aider(place: Place) -> Sequence[Command]:
    """Prompts come from the standard input, as a person would type them; `resume` is a second process."""
    variant, inner = _split(place)
    (place.work / NOTES).write_text("")
    if inner.scenario == "run":
        return with_run(inner, "aider", "--edit-format", variant, "--yes-always", "--no-git", NOTES, "--message")
    slow = f"Please think about it. [[slow {place.slow_s}]]"
    add = [f"Please add line {n} to {NOTES}. [[text {n}]]" for n in range(1, 13)]
    prompts = {
        "steps": [add],
        "title": [add[:3]],
        "compaction": [add],
        "resume": [add[:2], add[2:4]],
        "slow": [["Please add line 1. [[text 1]]", slow]],
    }[inner.scenario]
    options = ["--model", f"openai/{place.model}", "--edit-format", variant, "--yes-always", "--no-pretty", NOTES]
    options += ["--no-fancy-input", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    options += [] if inner.scenario == "title" else ["--no-git"]
    options += ["--max-chat-history-tokens", "200"] if inner.scenario == "compaction" else []
    writes = (NOTES, "".join(f"line {n}\n" for n in range(1, 13))) if inner.scenario == "steps" else None
    return [
        Command(
            argv=["aider", *options, *(["--restore-chat-history"] if at else [])],
            env=_env(place),
            stdin="\n".join(said),
            says=FINAL,
            writes=writes,
        )
        for at, said in enumerate(prompts)
    ]


def _scenarios(variants: Sequence[str], scenarios: Sequence[str], *more: str) -> list[str]:
    return [*(f"{variant}:{scenario}" for variant in variants for scenario in scenarios), *more]


LOOP = ("steps", "parallel")


def _agent(
    name: str,
    packages: Sequence[str],
    dialect: str,
    scenarios: Sequence[str],
    script: Script = with_helpers,
    *,
    wheels: Sequence[str] = (),
) -> Agent:
    commands = {"aider": _aider, "mini-swe-agent": _mini, "verifiers": _verifiers}.get(name) or _program(
        f"{name.replace('-', '_')}_agent"
    )
    return Agent(
        name=name,
        kind="pip",
        packages=packages,
        dialect=dialect,
        scenarios=scenarios,
        commands=commands,
        script=script,
        wheels=wheels,
    )


PYTHON_AGENTS = (
    _agent(
        "aider",
        ["aider-chat==0.86.2"],
        "chat",
        _scenarios(["diff", "whole"], ["steps", "title", "compaction", "resume"], "diff:slow", "whole:run"),
        as_edits,
    ),
    _agent(
        "mini-swe-agent",
        ["mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0"],
        "chat, responses",
        _scenarios(["chat", "responses", "text"], LOOP, "chat:slow", "chat:faults", "chat:run"),
        until_submitted,
    ),
    _agent(
        "smolagents",
        ["smolagents[openai]==1.26.0"],
        "chat",
        _scenarios(
            ["code", "code-stream", "tools", "tools-stream"],
            LOOP,
            *("tools-stream:slow", "tools:faults", "tools:run", "code-plan:steps"),
            *_scenarios(["code-team", "tools-team"], ["subagents"]),
        ),
        lambda messages, tools: (with_helpers if tools else as_python)(messages, tools),
    ),
    _agent(
        "openai-agents",
        ["openai-agents==0.24.0"],
        "chat, responses",
        _scenarios(
            ["chat", "chat-stream", "responses", "responses-stream", "responses-previous", "responses-conversation"],
            LOOP,
            *("responses-stream:slow", "responses:faults", "responses:run"),
            *("chat-settings:steps", "responses-settings:steps"),
            *_scenarios(["chat-team", "chat-stream-team", "responses-team", "responses-stream-team"], ["subagents"]),
            *_scenarios(["chat-handoff", "responses-stream-handoff", "responses-previous-handoff"], ["steps"]),
            *_scenarios(["chat-session", "responses-stream-session"], ["resume", "restart"]),
        ),
    ),
    _agent(
        "langgraph",
        ["langgraph==1.2.20", "langchain-openai==1.7.3"],
        "chat, responses",
        _scenarios(
            ["chat", "chat-stream", "responses", "responses-stream", "responses-previous"],
            LOOP,
            *("responses-stream:slow", "chat:faults", "chat:run", "chat-team:steps", "responses-team:steps"),
        ),
    ),
    _agent(
        "litellm",
        ["litellm==1.106.2", "mcp==2.3.0"],
        "chat, messages, responses",
        _scenarios(
            ["chat", "chat-stream", "messages", "responses", "responses-stream"],
            LOOP,
            *("messages:slow", "chat-stream:slow", "chat:faults", "chat:run"),
        ),
    ),
    _agent(
        "verifiers",
        ["verifiers==0.4.0", "uv==0.13.7", "anthropic==2.8.0"],
        "chat, messages, responses",
        _scenarios(
            ["bash", "chat", "responses", "previous", "loop"],
            LOOP,
            "bash:slow",
            "chat:faults",
            "bash:run",
            "bash:header",
        ),
        wheels=["openai", "mcp==2.0.0", "httpx", "httpx2", "tenacity", "certifi"],
    ),
    _agent(
        "anthropic",
        ["anthropic==2.8.0"],
        "messages",
        _scenarios(["loop", "runner", "runner-stream"], LOOP, "runner-stream:slow", "runner:faults", "loop:run"),
    ),
    _agent(
        "openai",
        ["openai==3.49.0"],
        "chat, responses",
        _scenarios(
            ["chat", "chat-stream", "responses", "responses-stream", "previous", "conversation"],
            LOOP,
            *("chat-stream:slow", "chat:faults", "previous:faults", "chat:run"),
        ),
    ),
)
