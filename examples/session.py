"""Two turns on one session: the second one computes only its own tokens.

.venv/bin/holdfast serve                          # in one terminal
.venv/bin/python examples/session.py              # in another; takes HOST:PORT as its argument
"""

import sys

from holdfast_sdk import Client, Session

from holdfast.chat.chat_model import load_chat
from holdfast.config import ChatConfig
from holdfast.models import open_model


def main(address: str) -> None:
    source = open_model()
    model = load_chat(source, ChatConfig(), source.architecture.vocab_size)
    tokenizer, chat = model.tokenizer, model.continuation

    def turn(session: Session, token_ids: list[int]) -> list[int]:
        generation = session.turn(token_ids, max_tokens=40, temperature=0, stop_token_ids=sorted(chat.stop_token_ids))
        for token in generation:
            print(tokenizer.decode([token.id], skip_special=True), end="", flush=True)
        print(f"\n  {generation.done.prefill_tokens} tokens prefilled, {len(generation.tokens)} sampled\n")
        return generation.tokens

    with Client(address) as client, client.create_session(label="example") as session:
        first = chat.first([{"role": "user", "content": "What is the capital of France?"}])
        sampled = turn(session, first.ids)
        turn(session, chat.tail(sampled[-1], [{"role": "user", "content": "And of Italy?"}]).ids)
        print(f"{session.info().history_length} tokens of history")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
