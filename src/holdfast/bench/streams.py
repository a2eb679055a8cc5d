"""How fast one stream comes through each endpoint, beside the engine alone, and while clients hammer the HTTP endpoint.

Engine, server and clients share the cores and take turns. A rate is counted from the first token on: what comes before
it is not decoding.
"""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator

from holdfast.bench.load import ask
from holdfast.bench.processes import Child, ProcessFailed, RunningServer, serving, started
from holdfast.bench.quality import long_text
from holdfast.bench.report import Results
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.models import open_model

LEAST = {"grpc_to_engine": 0.92, "http_to_engine": 0.92, "grpc_hammered_to_not": 0.85, "http_hammered_to_not": 0.85}
_HAMMER_TIMEOUT_S = 60.0
_STREAM_TIMEOUT_S = 300.0
_END = 3  # a control token that chat models do not sample
_NEXT_SEED = 1000


def measure_streams(
    model: str, results: Results, *, tokens: int, history: int, rounds: int, alone: Callable[[], float]
) -> None:
    """`alone`: the engine's own tokens/s after the same history, at temperature 1. Blocks for seconds a round."""
    tokenizer = load_tokenizer(open_model(model))
    ids = tokenizer.encode(long_text()[: 8 * history])[:history]
    text = tokenizer.decode(ids[: max(1, history - 32)])  # a template adds some tokens
    with serving(model, "--proposer", "none") as server, started("load", "hammer", server.http) as hammer:
        hammer.read(str)

        def rates(seed: int) -> dict[str, float]:
            grpc = _rate(lambda seed: _grpc_tokens(server, ids, tokens, seed), tokens, seed)
            return {"grpc": grpc, "http": _rate(lambda seed: _http_tokens(server, text, tokens, seed), tokens, seed)}

        rates(0)  # warm-up
        for index in range(1, rounds + 1):
            results.step(f"streams, round {index}")
            results.figure("engine_alone", "tokens/s", alone(), "higher")
            plain = rates(index)
            with _hammering(hammer):
                hammered = rates(index)
            for name in plain:
                results.figure(f"{name}_stream", "tokens/s", plain[name], "higher")
                results.figure(f"{name}_stream_hammered", "tokens/s", hammered[name], "higher")
                results.ratio(f"{name}_to_engine", f"{name}_stream", "engine_alone", "higher")
                results.ratio(f"{name}_hammered_to_not", f"{name}_stream_hammered", f"{name}_stream", "higher")
            results.on_round()


def _rate(stream: Callable[[int], Iterable[int]], tokens: int, seed: int) -> float:
    """Tokens per second. `stream` yields how many tokens there are, first for the first one; a reply that ends early
    is asked for again with another seed."""
    while True:
        counted = [(num, time.perf_counter()) for num in stream(seed)]
        (_, began), (num, ended) = counted[0], counted[-1]
        if num >= tokens / 2:
            return (num - 1) / (ended - began)
        seed += _NEXT_SEED


def _grpc_tokens(server: RunningServer, ids: list[int], tokens: int, seed: int) -> Iterator[int]:
    from holdfast_sdk import Client

    with Client(server.grpc) as client, client.create_session(eos_token_ids=[_END]) as session:
        session.append(ids)
        for num, _ in enumerate(session.generate(max_tokens=tokens, seed=seed, temperature=1.0), 1):
            yield num


def _http_tokens(server: RunningServer, text: str, tokens: int, seed: int) -> Iterator[int]:
    """1 at the first text, and all tokens at the end: how many are in a chunk is not said."""
    address = server.http.removeprefix("http://")
    session = ask("POST", address, "/sessions")["session_id"]
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "temperature": 1.0, "seed": seed}
    body |= {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(address, timeout=_STREAM_TIMEOUT_S)
    try:
        connection.request("POST", f"/sessions/{session}/v1/chat/completions", json.dumps(body))
        has_begun, usage = False, {}
        for line in connection.getresponse():
            if not has_begun and b'"delta":{"content":"' in line and b'"delta":{"content":""' not in line:
                has_begun = True
                yield 1
            if b'"completion_tokens"' in line:
                usage = json.loads(line.removeprefix(b"data: "))["usage"]
        yield usage["completion_tokens"]
    except (KeyError, OSError) as exc:
        raise ProcessFailed(f"the stream over HTTP failed: {exc!r}") from exc
    finally:
        connection.close()
        ask("DELETE", address, f"/sessions/{session}")


@contextlib.contextmanager
def _hammering(hammer: Child) -> Iterator[None]:
    before = hammer.ask(True, int, timeout_s=_HAMMER_TIMEOUT_S)
    try:
        yield
    finally:
        after = hammer.ask(False, int, timeout_s=_HAMMER_TIMEOUT_S)
    if after == before:
        raise ProcessFailed("the clients that hammer the HTTP endpoint got no response")
