"""An agent with a tool on a session, then a training step on its samples.

.venv/bin/holdfast serve                          # in one terminal
.venv/bin/python examples/rollout.py              # in another; takes the server's URL as its argument

The policy is loaded with transformers from the same weights, so its logprobs of the sampled tokens can be compared with
the recorded ones. The tokens are exact. The logprobs differ by what the two compute with: the server rounds weights to
int8 by default, the policy uses float32. The largest difference is printed; about 0.2 is usual, a ratio of 0.8 to 1.2.
"""

import json
import sys
from typing import Any

import httpx
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from holdfast.chats.samples.formats import decode
from holdfast.chats.samples.sample import Sample
from holdfast.models import open_model

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "roll",
        "description": "Roll a die",
        "parameters": {
            "type": "object",
            "properties": {"sides": {"type": "integer", "enum": [6, 8, 20]}},
            "required": ["sides"],
        },
    },
}


def act(server: str, session: str, num_turns: int = 3) -> float:
    """Let the agent roll dice; its reward is how often it took the largest one."""
    client = OpenAI(base_url=f"{server}/sessions/{session}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Roll the die with the most sides."}]
    reward = 0.0
    for _ in range(num_turns):
        reply = client.chat.completions.create(
            model="any",
            messages=messages,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_completion_tokens=64,
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            sides = json.loads(call.function.arguments)["sides"]
            reward += sides == 20
            print(f"  rolled a d{sides}; {reply.usage.prompt_tokens_details.cached_tokens} cached tokens")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"You rolled {sides // 2}."})
    return reward / num_turns


def logprobs_of(policy: Any, sample: Sample) -> torch.Tensor:
    """The policy's logprob of every response token, given all tokens before it."""
    tokens = torch.tensor(sample.tokens)
    logits = policy(tokens[None]).logits[0].float()
    start = len(sample.tokens) - len(sample.loss_mask)
    logprobs = torch.log_softmax(logits[start - 1 : -1], -1)
    return logprobs.gather(1, tokens[start:, None])[:, 0]


def train(samples: list[Sample]) -> None:
    """One policy gradient step on the sampled tokens."""
    source = open_model()
    policy = AutoModelForCausalLM.from_pretrained(source.path.parent, gguf_file=source.path.name, dtype=torch.float32)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    baseline = sum(sample.reward or 0.0 for sample in samples) / len(samples)
    loss, trained, drift = torch.zeros(()), 0, 0.0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        new = logprobs_of(policy, sample)[mask]
        # The grammar left the sampler few choices, so the distribution it drew from is narrower than the policy's:
        # compare with the model's own logprobs, which are on record beside them.
        old = torch.tensor(sample.logprobs, dtype=torch.float32)[mask]
        drift = max(drift, float((new.detach() - old).abs().max()))
        loss = loss - ((sample.reward or 0.0) - baseline) * torch.exp(new - old).sum()
        trained += int(mask.sum())
    (loss / trained).backward()
    optimizer.step()
    print(f"{trained} tokens trained; logprobs differ by at most {drift:.3f} from those on record")


def main(server: str) -> None:
    samples: list[Sample] = []
    for rollout in range(3):
        body = {"group": "dice", "label": f"rollout {rollout}"}
        session = httpx.post(f"{server}/sessions", json=body).json()["session_id"]
        reward = act(server, session)
        httpx.post(f"{server}/sessions/{session}/reward", json={"reward": reward})
        exported = httpx.post(f"{server}/sessions/{session}/samples", json={"format": "json"})
        samples += decode(exported.content).samples
        httpx.delete(f"{server}/sessions/{session}")
        print(f"rollout {rollout}: reward {reward:.2f}")
    train(samples)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
