"""llama.cpp as a contestant, by its Python package. A script for a Python that has that and nothing of ours.

Takes the orders that contestant.py takes, one JSON object a line, and answers with the seconds. Does not sample: only
what the model itself takes is counted.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    import llama_cpp  # type: ignore[import-not-found]

    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = {"n_threads": threads, "n_threads_batch": threads, "n_batch": 512, "verbose": False}
    model = llama_cpp.Llama(path, n_ctx=context, **options)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(model, json.loads(line))), flush=True)


def obey(model: Any, order: dict[str, Any]) -> float:
    num, history = order["tokens"], order["history"]
    if order["what"] == "prefill":
        model.reset()
        return timed(model, [tokens(num, model.n_vocab())])
    if model.n_tokens != history:
        model.reset()
        model.eval(tokens(history, model.n_vocab()))
    took = timed(model, [[5]] * num)
    model.n_tokens = history  # the next eval takes the rest out of the cache
    return took


def timed(model: Any, batches: list[list[int]]) -> float:
    started = time.perf_counter()
    for batch in batches:
        model.eval(batch)
    return time.perf_counter() - started


def tokens(num: int, vocabulary: int) -> list[int]:
    return [(7919 * index + 13) % vocabulary for index in range(num)]


if __name__ == "__main__":
    main()
