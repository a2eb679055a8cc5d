"""A scripted model behind SGLang's API: a script decides what it says, and every exchange is logged as token ids."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.chat.tool_calls import render_call
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import FakeModel, FakeReply, Fault, Json, need
from tests.qwen3 import FOLDER, VOCABULARY, qwen3

CONTEXT = 262_144
LATE_S = 2.5  # after which a fault with status 500 comes: later than the first bytes of a stream
_EOS = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model says, after `wait_s` seconds."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    wait_s: float = 0.0

    def spelled(self) -> str:
        """As Qwen3 writes it, without the token that ends it."""
        think = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [render_call(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in self.calls]
        return think + "\n".join(filter(None, [self.content, *calls]))


Script = Callable[[list[Json], list[Json]], Reply]
"""From the messages and tools of a request to the reply. Pure, as agents repeat requests and ask in any order."""


class ScriptedModel(FakeSGLang):
    """Speaks SGLang's API, and vLLM's where a request has vLLM's fields.

    `exchanges` has what was sent to the server: input_ids, output_ids, messages, the tools' names, seconds.
    """

    def __init__(self, script: Script, log: Path | None = None) -> None:
        super().__init__(FakeModel(name="scripted", vocab_size=VOCABULARY, eos_token_id=151_645, context=CONTEXT))
        self.script = script
        self.log = log
        self.exchanges: list[Json] = []
        self._tokenizer = qwen3().tokenizer

    async def _chat(self, request: Json, reply: FakeReply) -> None:
        self._check_chat(request, reply)
        of_vllm = request.get("kv_transfer_params", {}).get("prompt_token_ids")
        prompt = self._check_prompt(of_vllm or request.get("input_ids"))
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or CONTEXT
        need(len(prompt) + (0 if limit == CONTEXT else limit) <= CONTEXT, "the context is too long")
        started = time.time()
        if reply.request.headers.get("x-smg-routing-key") == "holdfast-probe":
            said = Reply(content="ok")
        else:
            said = self.script(request["messages"], request.get("tools") or [])
        said, ids, ended_by = self._written(said, request.get("stop"))
        is_cut = len(ids) > limit
        ids = ids[:limit]
        await asyncio.sleep(LATE_S if reply.fault.status == 500 else said.wait_s)
        if reply.request.headers.get("x-smg-routing-key") != "holdfast-probe" and reply.fault == Fault():
            self._note(request, prompt, ids, started)
        finish = {"type": "length", "length": limit} if is_cut else ended_by
        completion = self._completion(request["messages"], prompt, ids, said, finish)
        await reply.send(_as_vllm(completion, prompt) if of_vllm else completion)

    def _written(self, said: Reply, stop: Any) -> tuple[Reply, list[int], Json]:
        """The reply without what begins with a stop string, its tokens with that string, and what has ended it."""
        stops = [one for one in ([stop] if isinstance(stop, str) else stop or []) if one in said.content]
        if not stops:
            return said, self._tokenizer.encode(said.spelled() + _EOS), {"type": "stop", "matched": 151_645}
        first = min(stops, key=said.content.index)
        at = said.content.index(first)
        kept, sampled = (replace(said, content=said.content[:end], calls=()) for end in (at, at + len(first)))
        return kept, self._tokenizer.encode(sampled.spelled()), {"type": "stop", "matched": first}

    def _note(self, request: Json, prompt: list[int], ids: list[int], started: float) -> None:
        tools = [tool.get("function", {}).get("name") for tool in request.get("tools") or []]
        exchange = {"input_ids": prompt, "output_ids": ids, "messages": request["messages"], "tools": tools}
        self.exchanges.append(exchange | {"started": started, "ended": time.time()})
        if self.log:
            with self.log.open("a") as stream:
                stream.write(json.dumps(self.exchanges[-1]) + "\n")

    def _completion(self, messages: list[Json], prompt: list[int], ids: list[int], said: Reply, finish: Json) -> Json:
        text = self._tokenizer.decode(ids, skip_special=True)
        message: Json = {"role": "assistant", "content": said.content, "reasoning_content": said.reasoning or None}
        message["tool_calls"] = [_call(call, messages, at) for at, call in enumerate(said.calls)] or None
        if finish["type"] == "length":  # a server that parses replies finds neither reasoning nor a call that is over
            message |= {"content": text, "reasoning_content": None, "tool_calls": None}
        entries = [[logprob_of(at, token), token, None] for at, token in enumerate(ids)]
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "tool_calls" if message["tool_calls"] else finish["type"],
            "meta_info": counts | {"finish_reason": finish, "output_token_logprobs": entries, "weight_version": "1"},
        }
        about = {"id": f"chat-{len(self.exchanges)}", "object": "chat.completion", "created": 1, "model": "scripted"}
        return about | {"choices": [choice], "usage": counts | {"total_tokens": len(prompt) + len(ids)}}


def logprob_of(at: int, token: int) -> float:
    """The logprob of the reply's token number `at`."""
    return -(1 + (at * 37 + token) % 100) / 64


def _as_vllm(completion: Json, prompt: list[int]) -> Json:
    """The same completion in vLLM's format."""
    (choice,) = completion["choices"]
    entries = choice.pop("meta_info")["output_token_logprobs"]
    choice["message"]["reasoning"] = choice["message"].pop("reasoning_content")
    choice["token_ids"] = [token for _, token, _ in entries]
    choice["logprobs"] = {"content": [{"token": f"token_id:{token}", "logprob": value} for value, token, _ in entries]}
    return completion | {"prompt_token_ids": prompt}


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _call(call: Call, messages: list[Json], at: int) -> Json:
    """The id depends only on what a recording keeps, so that the same recording gets the same ids again."""
    plans = [line for m in messages if m["role"] == "user" for line in text_of(m).splitlines() if "[[" in line]
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    key = json.dumps([len(messages), at, plans, call.name]).encode()
    call_id = f"call_{hashlib.blake2b(key, digest_size=8).hexdigest()}"
    return {"id": call_id, "type": "function", "index": None, "function": function}


def model_folder(folder: Path) -> Path:
    """A directory that `holdfast serve` takes for a model with Qwen3's tokenizer and template. It has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to((FOLDER / name).resolve())
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": [151_645, 151_643],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
