"""LangGraph. Variants: an API (`chat`, `responses`), then any of `stream`, `previous` (previous_response_id) and `team`
(two agents side by side before the main one), joined by `-`."""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from toolbox import INSTRUCTIONS, MAX_STEPS, MODEL, TASK, VARIANT, bash

api, *extras = VARIANT.split("-")
model = ChatOpenAI(
    model=MODEL,
    use_responses_api=api == "responses",
    use_previous_response_id="previous" in extras,
    output_version="responses/v1" if api == "responses" else None,
    streaming="stream" in extras,
).bind_tools([bash])


def agent(instructions: str) -> Any:
    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([("system", instructions), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call)
    graph.add_node("tools", ToolNode([bash]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "model")
    return graph.compile()


def helper(name: str) -> Any:
    worker = agent(f"You are {name}. {INSTRUCTIONS}")

    def run(state: MessagesState) -> dict[str, Any]:
        done = worker.invoke({"messages": state["messages"][:1]}, {"recursion_limit": 4 * MAX_STEPS})
        return {"messages": [("user", f"{name} reports: {done['messages'][-1].text}")]}

    return run


graph = agent(INSTRUCTIONS)
if "team" in extras:
    team = StateGraph(MessagesState)
    team.add_node("main", graph)
    for name in ("task_one", "task_two"):
        team.add_node(name, helper(name))
        team.add_edge(START, name)
        team.add_edge(name, "main")
    graph = team.compile()
final = graph.invoke({"messages": [("user", TASK)]}, {"recursion_limit": 4 * MAX_STEPS})
print(final["messages"][-1].text)
