"""`python -m tests.agents AGENT SCENARIO` runs one; `install AGENT` installs it; `--list` shows all."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from tests.agents.agent import Agent, install
from tests.agents.npm_agents import NPM_AGENTS
from tests.agents.python_agents import PYTHON_AGENTS
from tests.agents.runner import run

AGENTS: dict[str, Agent] = {agent.name: agent for agent in (*NPM_AGENTS, *PYTHON_AGENTS)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--list", action="store_true", help="show all agents and their scenarios")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the agent's requests to a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the result to a file, one line each")
    parser.add_argument("--history", choices=["strict", "forest"], default="forest", help="kind of the session")
    parser.add_argument("--slow-s", type=int, default=150, metavar="S", help="seconds of the slow reply")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="a further one of the server")
    parser.add_argument("agent", nargs="?", metavar="AGENT", help="an agent, or `install`")
    parser.add_argument("what", nargs="*", metavar="SCENARIO", help="scenarios (all of them if none is given)")
    arguments = parser.parse_args()
    if arguments.list or not arguments.agent:
        for agent in AGENTS.values():
            print(f"{agent.name:24} {agent.dialect:10} {', '.join(agent.scenarios)}  ({', '.join(agent.packages)})")
        return 0
    if arguments.agent == "install":
        for name in arguments.what:
            install(AGENTS[name])
        return 0
    agent, is_ok = AGENTS[arguments.agent], True
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


if __name__ == "__main__":
    sys.exit(main())
