"""n answers to one prompt by forking a session: the prompt is computed once, the best answer is kept.

.venv/bin/holdfast serve                          # in one terminal
.venv/bin/python examples/best_of_n.py            # in another; --help lists the options

A fork copies the cache, so a branch computes only what it samples. The branches are separate sessions that run at the
same time, batched in the engine's steps. The score is the mean logprob; put your own into `score`.
"""

import argparse
import asyncio
from dataclasses import dataclass

from holdfast_sdk import AsyncClient, AsyncSession

from holdfast.chat.chat_model import load_chat
from holdfast.config import ChatConfig
from holdfast.models import open_model


@dataclass
class Answer:
    session: AsyncSession
    token_ids: list[int]
    logprobs: list[float]
    prefill_tokens: int

    @property
    def score(self) -> float:
        return sum(self.logprobs) / len(self.logprobs)


async def sampled(session: AsyncSession, seed: int, max_tokens: int, stop: list[int]) -> Answer:
    generation = await session.generate(max_tokens=max_tokens, temperature=0.7, seed=seed, stop_token_ids=stop)
    logprobs = [token.logprob async for token in generation]
    return Answer(session, generation.tokens, logprobs, generation.done.prefill_tokens)


async def run(arguments: argparse.Namespace) -> None:
    source = open_model()
    model = load_chat(source, ChatConfig(), source.architecture.vocab_size)
    stop = sorted(model.continuation.stop_token_ids)
    prompt = model.continuation.first([{"role": "user", "content": arguments.prompt}]).ids

    async with AsyncClient(arguments.server) as client:
        root = await client.create_session(label="best of n")
        await root.append(prompt)
        branches = [root, *[await root.fork() for _ in range(arguments.n - 1)]]
        answers = await asyncio.gather(
            *(sampled(branch, seed, arguments.max_tokens, stop) for seed, branch in enumerate(branches))
        )
        print(f"{len(prompt)} tokens of prompt, computed once")
        for answer in sorted(answers, key=lambda answer: answer.score):
            text = model.tokenizer.decode(answer.token_ids, skip_special=True)
            print(f"{answer.score:7.3f}  {answer.prefill_tokens} prefilled  {text!r}")
        best = max(answers, key=lambda answer: answer.score)
        for branch in branches:
            if branch is not best.session:
                await branch.close()
        print(f"kept: session {best.session.id}, {(await best.session.info()).history_length} tokens")
        if not arguments.keep:
            await best.session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Write one sentence about the sea.")
    parser.add_argument("--server", default="127.0.0.1:50051", help="gRPC address, HOST:PORT")
    parser.add_argument("-n", type=int, default=4, help="number of answers")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--keep", action="store_true", help="leave the best session open, to continue it")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
