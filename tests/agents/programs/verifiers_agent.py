"""verifiers: one rollout. `bash` is its own agent; `chat`, `responses`, `previous` (openai_agent.py) and `loop`
(anthropic_agent.py) are agents of ours, run by a harness as a user of verifiers would write it."""

import asyncio
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from toolbox import MODEL, TASK, VARIANT

__all__ = ["LoopHarness"]


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    """Runs a tool loop against the rollout's endpoint, which passes its requests on."""

    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        name = "anthropic_agent.py" if VARIANT == "loop" else "openai_agent.py"
        env = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret, "OPENAI_MODEL": ctx.model}
        env |= {"ANTHROPIC_BASE_URL": endpoint.removesuffix("/v1"), "ANTHROPIC_API_KEY": secret}
        return await runtime.run_program([sys.executable, str(Path(__file__).parent / name), VARIANT, data.prompt], env)


class OneTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        return 1.0


async def main() -> None:
    config = vf.AgentConfig(
        harness={"id": "bash" if VARIANT == "bash" else "verifiers_agent"},
        runtime=vf.SubprocessConfig(),
        model=MODEL,
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
    )
    trace = await vf.Agent(config).run(OneTask(vf.TaskData(prompt=TASK), vf.TaskConfig()))
    print(trace.last_reply)
    if trace.errors:
        raise SystemExit(str(trace.errors))


if __name__ == "__main__":
    asyncio.run(main())
