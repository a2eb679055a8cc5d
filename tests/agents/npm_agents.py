"""Agents from npm: Claude Code, Codex, opencode and qwen-code, each with the settings that it needs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.agents.agent import Agent, Command, Place
from tests.agents.scripts import FINAL

SCENARIOS = (
    *("steps", "title", "parallel", "subagents", "crowd", "compaction", "resume", "restart", "kill", "slow"),
    *("faults", "run", "header"),
)


def prompts_for(place: Place) -> list[str]:
    """What the user says, one prompt for each process that is started; the second one resumes the first."""
    return {
        "steps": ["Please do twelve steps. [[steps 12]]"],
        "title": ["Please do three steps. [[steps 3]]"],
        "parallel": ["Please do three things at once. [[parallel 3]]"],
        "subagents": ["Please let two agents do it. [[subagents 2]]"],
        "compaction": ["Please read a lot. [[big 8]]"],
        "forks": ["Please let two forks do it. [[forks 2]]"],
        "crowd": ["Please let six agents do it. [[subagents 6]]"],
        "resume": ["Please do two steps. [[steps 2]]", "And now three more. [[steps 3]]"],
        "restart": ["Please do two steps. [[steps 2]]", "And now three more. [[steps 3]]"],
        "kill": ["Please think about it. [[slow 600]]", "And now do three steps. [[steps 3]]"],
        "header": ["Please do three steps. [[steps 3]]"],
        "run": ["Please do three steps. [[steps 3]]"],
        "faults": ["Please do six steps. [[steps 6]]"],
        "slow": [f"Please think about it. [[slow {place.slow_s}]]"],
    }[place.scenario]


def with_run(place: Place, *argv: str, **env: str) -> Sequence[Command]:
    """The agent as `holdfast run` starts it, which tells it everything about the server."""
    run = [sys.executable, "-m", "holdfast.cli", "run", "--server", place.server, "--label", "run", "--"]
    path = str(Path(__file__).parents[2] / "src")
    return [Command(argv=[*run, *argv, *prompts_for(place)], env={"PYTHONPATH": path} | env, says=FINAL)]


def _claude_code(place: Place) -> Sequence[Command]:
    if place.scenario == "run":
        return with_run(place, "claude", "--dangerously-skip-permissions", "-p", IS_SANDBOX="1")
    env = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": place.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else forks of a conversation have another system prompt
        "IS_SANDBOX": "1",  # it may run as root
    }
    if place.scenario != "title":
        env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    if place.scenario == "compaction":
        env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = "60000"
    base = ["claude", "--dangerously-skip-permissions", "-p"]
    if place.scenario == "title":  # only an interactive session has one
        seen = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
        known = {
            "hasCompletedOnboarding": True,
            "theme": "dark",
            "bypassPermissionsModeAccepted": True,
            "customApiKeyResponses": {"approved": [place.key[-20:]], "rejected": []},
            "projects": {str(place.work): seen},
        }
        (place.home / ".claude.json").write_text(json.dumps(known))
        return [
            Command(argv=[*base[:-1], prompt], env=env | {"TERM": "xterm"}, says=FINAL, typed=["/exit"])
            for prompt in prompts_for(place)
        ]
    return [
        Command(argv=[*base, prompt, *(["--continue"] if at else [])], env=env, says=FINAL)
        for at, prompt in enumerate(prompts_for(place))
    ]


def _codex(place: Place) -> Sequence[Command]:
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    if place.scenario == "run":
        return with_run(place, "codex", "exec", *options)
    folder = place.home / ".codex"
    folder.mkdir(exist_ok=True)
    limits = "model_auto_compact_token_limit = 40000\n" if place.scenario == "compaction" else ""
    (folder / "config.toml").write_text(
        f'model = "{place.model}"\nmodel_provider = "holdfast"\nmodel_context_window = 200000\n{limits}'
        f'[model_providers.holdfast]\nname = "Holdfast"\nbase_url = "{place.v1}"\nenv_key = "OPENAI_API_KEY"\n'
        'wire_api = "responses"\n[analytics]\nenabled = false\n'
    )
    env = {"OPENAI_API_KEY": place.key, "CODEX_HOME": str(folder)}
    return [
        Command(argv=["codex", "exec", *options, *(["resume", "--last"] if at else []), prompt], env=env, says=FINAL)
        for at, prompt in enumerate(prompts_for(place))
    ]


def _opencode(place: Place) -> Sequence[Command]:
    if place.scenario == "run":
        return with_run(place, "opencode", "run")
    context = 60_000 if place.scenario == "compaction" else 200_000
    config = {
        "model": f"holdfast/{place.model}",
        "share": "disabled",
        "autoupdate": False,
        "permission": {"*": "allow"},
        "provider": {
            "holdfast": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": place.v1, "apiKey": place.key},
                "models": {place.model: {"limit": {"context": context, "output": 8000}}},
            }
        },
    }
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return [
        Command(argv=["opencode", "run", *(["--continue"] if at else []), prompt], env=env, says=FINAL)
        for at, prompt in enumerate(prompts_for(place))
    ]


def _qwen_code(place: Place) -> Sequence[Command]:
    if place.scenario == "run":
        return with_run(place, "qwen", "--yolo", "-p")
    folder = place.home / ".qwen"
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True},
    }
    if place.scenario == "compaction":
        settings["model"] = {"generationConfig": {"contextWindowSize": 60_000}}
    (folder / "settings.json").write_text(json.dumps(settings))
    env = {"OPENAI_API_KEY": place.key, "OPENAI_BASE_URL": place.v1, "OPENAI_MODEL": place.model}
    return [
        Command(
            argv=["qwen", "--auth-type", "openai", "--yolo", *(["--continue"] if at else []), "-p", prompt],
            env=env,
            says=FINAL,
        )
        for at, prompt in enumerate(prompts_for(place))
    ]


def _with_kill(place: Place, commands: Sequence[Command]) -> Sequence[Command]:
    """In the scenario `kill`, the first command ends in the middle of its slow reply."""
    if place.scenario != "kill":
        return commands
    return [replace(commands[0], killed_after_s=20, says=""), *commands[1:]]


NPM_AGENTS = (
    Agent(
        name="claude-code",
        kind="npm",
        packages=["@anthropic-ai/claude-code@2.1.325"],
        dialect="messages",
        scenarios=[*SCENARIOS, "forks"],
        commands=lambda place: _with_kill(place, _claude_code(place)),
    ),
    Agent(
        name="codex",
        kind="npm",
        packages=["@openai/codex@0.166.0"],
        dialect="responses",
        scenarios=[name for name in SCENARIOS if name != "title"],
        commands=lambda place: _with_kill(place, _codex(place)),
    ),
    Agent(
        name="opencode",
        kind="npm",
        packages=["opencode-ai@1.18.33"],
        dialect="chat",
        scenarios=SCENARIOS,
        commands=lambda place: _with_kill(place, _opencode(place)),
    ),
    Agent(
        name="qwen-code",
        kind="npm",
        packages=["@qwen-code/qwen-code@0.24.4"],
        dialect="chat",
        scenarios=[name for name in SCENARIOS if name != "header"],  # it sends no id
        commands=lambda place: _with_kill(place, _qwen_code(place)),
    ),
)
