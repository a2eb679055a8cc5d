"""smolagents: `code` (CodeAgent), `tools` (ToolCallingAgent), then `stream`, `team` (managed agents) or
`plan` (a planning step every few steps), joined by `-`."""

import os

from smolagents import CodeAgent, LogLevel, MultiStepAgent, OpenAIModel, ToolCallingAgent, tool
from toolbox import MAX_STEPS, MODEL, TASK, VARIANT, bash

model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
name, *extras = VARIANT.split("-")
kind = {"code": CodeAgent, "tools": ToolCallingAgent}[name]


def agent(**options: object) -> MultiStepAgent:
    return kind(
        model=model,
        max_steps=MAX_STEPS,
        verbosity_level=LogLevel.ERROR,
        stream_outputs="stream" in extras,
        planning_interval=4 if "plan" in extras else None,
        **{"tools": [tool(bash)]} | options,
    )


if "team" in extras:
    helpers = [agent(name=name, description="Carries out a part of the task.") for name in ("task_one", "task_two")]
    main = agent(managed_agents=helpers)
else:
    main = agent()
print(main.run(TASK))
