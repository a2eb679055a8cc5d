"""A chat reply read for a second time, by other code than ours: may it be recorded, and as which tokens?"""

import json
import math
from typing import Any

ENDINGS = {"stop", "length", "tool_calls"}


class NotRight(Exception):
    """Why a reply may not be recorded."""


def need(condition: object, why: str) -> None:
    if not condition:
        raise NotRight(why)


def right_tokens(kind: str, status: int, body: bytes, prompt: list[int], vocab_size: int) -> list[int]:
    """The sampled tokens of a reply of `kind` to `prompt`."""
    need(status == 200, f"its status is {status}")
    try:
        reply = json.loads(body)
        need(len(reply["choices"]) == 1, "there is not one choice")
        choice, usage = reply["choices"][0], reply.get("usage")
        tokens, logprobs, counts = _sglang(choice) if kind == "sglang" else _vllm(reply, choice, prompt)
        told = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        raise NotRight(f"it cannot be read: {type(exc).__name__} {exc}") from exc
    for number in (counts[0], told):
        need(type(number) is not int or number == len(prompt), f"it read {number} prompt tokens, not {len(prompt)}")
    need(counts[1] == len(tokens) == len(logprobs), "its counts differ")
    need(all(type(token) is int and 0 <= token < vocab_size for token in tokens), "a token is not in the vocabulary")
    need(all(type(p) in (int, float) and math.isfinite(p) and p <= 1e-4 for p in logprobs), "a logprob is none")
    need(choice["finish_reason"] in ENDINGS, f"its ending is {choice['finish_reason']!r}")
    message = choice["message"]
    need(message.get("role") == "assistant", "its role is not assistant")
    need(tokens or not (message.get("content") or message.get("tool_calls")), "it has text, but no tokens")
    return tokens


def _sglang(choice: Any) -> tuple[list[int], list[float], tuple[Any, Any]]:
    meta = choice["meta_info"]
    pairs = [(entry[1], entry[0]) for entry in meta["output_token_logprobs"]]
    finish = meta.get("finish_reason")
    ending = finish["type"] if isinstance(finish, dict) else finish
    is_same = ending == choice["finish_reason"] or (ending == "stop" and choice["finish_reason"] == "tool_calls")
    need(finish is None or is_same, f"its endings are {ending!r} and {choice['finish_reason']!r}")
    counts = meta.get("prompt_tokens"), meta["completion_tokens"]
    return [token for token, _ in pairs], [logprob for _, logprob in pairs], counts


def _vllm(reply: Any, choice: Any, prompt: list[int]) -> tuple[list[int], list[float], tuple[Any, Any]]:
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    need([entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens], "logprobs of other tokens")
    need(reply["prompt_token_ids"] == prompt, "it read another prompt")
    usage = reply["usage"]
    return tokens, [entry["logprob"] for entry in content], (usage.get("prompt_tokens"), usage["completion_tokens"])
