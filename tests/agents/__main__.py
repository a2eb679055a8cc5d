"""`python -m tests.agents AGENT SCENARIO` runs one; `install AGENT` installs it; `--list` shows all."""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.agents.agent import Agent, agents_folder, install
from tests.agents.npm_agents import NPM_AGENTS
from tests.agents.python_agents import PYTHON_AGENTS
from tests.agents.runner import run

AGENTS: dict[str, Agent] = {agent.name: agent for agent in (*NPM_AGENTS, *PYTHON_AGENTS)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--list", action="store_true", help="show all agents and their scenarios")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the agent's requests to a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the result to a file, one line each")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show the results in such a file as a table")
    parser.add_argument("--history", choices=["strict", "forest"], default="forest", help="kind of the session")
    parser.add_argument("--slow-s", type=int, default=150, metavar="S", help="seconds of the slow reply")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="a further one of the server")
    parser.add_argument("agent", nargs="?", metavar="AGENT", help="an agent, or `install`")
    parser.add_argument("what", nargs="*", metavar="SCENARIO", help="scenarios (all of them if none is given)")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table(map(json.loads, arguments.table.read_text().splitlines()))))
        return 0
    if arguments.list or not arguments.agent:
        for agent in AGENTS.values():
            print(f"{agent.name:24} {agent.dialect:10} {', '.join(agent.scenarios)}  ({', '.join(agent.packages)})")
        return 0
    if arguments.agent == "install":
        for name in arguments.what:
            install(AGENTS[name])
        return 0
    if arguments.agent not in AGENTS:
        parser.error(f"no agent {arguments.agent!r}; there are {', '.join(AGENTS)}")
    agent, is_ok = AGENTS[arguments.agent], True
    if unknown := set(arguments.what) - set(agent.scenarios):
        parser.error(f"{agent.name} has no scenario {min(unknown)!r}; there are {', '.join(agent.scenarios)}")
    if not (agents_folder() / agent.name).is_dir():
        parser.error(f"{agent.name} is not installed; run: python -m tests.agents install {agent.name}")
    for scenario in arguments.what or agent.scenarios:
        print(f"== {agent.name} {scenario}", flush=True)
        result = asyncio.run(
            run(
                agent,
                scenario,
                history=arguments.history,
                slow_s=arguments.slow_s,
                options=arguments.serve,
                record=arguments.record,
            )
        )
        print(json.dumps(result), flush=True)
        if arguments.json:
            with arguments.json.open("a") as stream:
                stream.write(json.dumps(result) + "\n")
        is_ok &= result["is_ok"]
    return 0 if is_ok else 1


def table(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Rows of Markdown, one for each agent: the last result of each scenario, as requests and conversations."""
    last = {(result["agent"], result["scenario"]): result for result in results}
    yield "| agent | packages | date | scenario: requests, conversations | passed |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(agent for agent, _ in last):
        own = [result for (agent, _), result in last.items() if agent == name]
        runs = [f"{r['scenario']}: {r['requests']}, {r['roots']}" + ("" if r["is_ok"] else " FAILED") for r in own]
        passed = f"{sum(r['is_ok'] for r in own)} of {len(own)}"
        yield f"| {name} | {', '.join(own[-1]['packages'])} | {own[-1]['date']} | {'; '.join(runs)} | {passed} |"


if __name__ == "__main__":
    sys.exit(main())
