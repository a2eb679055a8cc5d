"""llama.cpp as a contestant, with its Python package. A script for a Python interpreter that has nothing of ours.

Takes the same tasks as `engine_speed.Contestant`, one JSON object per line, and answers with the seconds. It does not
sample: only the forward passes of the model are timed.
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
        print(json.dumps(run(model, json.loads(line))), flush=True)


def run(model: Any, task: dict[str, Any]) -> float:
    num, history = task["tokens"], task["history"]
    if task["what"] == "prefill":
        model.reset()
        return timed(model, [tokens(num, model.n_vocab())])
    if model.n_tokens != history:
        model.reset()
        model.eval(tokens(history, model.n_vocab()))
    took_s = timed(model, [[5]] * num)
    model.n_tokens = history  # the next eval removes the rest from the cache
    return took_s


def timed(model: Any, batches: list[list[int]]) -> float:
    started = time.perf_counter()
    for batch in batches:
        model.eval(batch)
    return time.perf_counter() - started


def tokens(num: int, vocabulary: int) -> list[int]:
    return [(7919 * index + 13) % vocabulary for index in range(num)]


if __name__ == "__main__":
    main()
