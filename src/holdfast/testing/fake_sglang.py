"""A strict fake SGLang."""

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.testing.fake_model import DrawnToken
from holdfast.testing.fake_upstream import FakeReply, FakeUpstream, Json, need

_SAMPLING = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "max_new_tokens",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)


class FakeSGLang(FakeUpstream):
    """`is_incremental`: streamed events have the new tokens alone, as with --incremental-streaming-output."""

    is_incremental = False

    def _routes(self) -> dict[tuple[str, str], Callable[[Json, FakeReply], Awaitable[None]]]:
        return {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/generate"): self._generate,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
        }

    async def _chat(self, request: Json, reply: FakeReply) -> None:
        max_tokens = self._check_chat(request, reply)
        prompt = self._check_prompt(request.get("input_ids"))
        need(request.get("return_meta_info") is True, "return_meta_info must be true")
        need(request.get("no_stop_trim") is False, "no_stop_trim must be false")
        start = request.get("routed_experts_start_len", 0)
        need(type(start) is int and 0 <= start <= len(prompt), "routed_experts_start_len is beyond the prompt")
        drawn = await self._draw(prompt, request, max_tokens)
        finish = self._finish(drawn, max_tokens)
        meta = self._meta(prompt, drawn) | {"finish_reason": finish}
        extension = {}
        if request.get("return_routed_experts") and self.routed_experts is not None:
            meta["routed_experts"] = self.routed_experts
            extension = {"sglext": {"routed_experts": self.routed_experts}}
        if request.get("return_indexer_topk"):
            meta["indexer_topk"] = [[1, 2], [3, 4]]
        text = self.model.decode([d.token for d in drawn if d.token != self.model.eos_token_id])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None},
            "logprobs": {"content": [{"token": "x", "logprob": d.logprob} for d in drawn]},
            "finish_reason": finish["type"],
            "matched_stop": finish.get("matched"),
            "meta_info": meta,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(drawn),
            "total_tokens": len(prompt) + len(drawn),
        }
        content = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": self.model.name}
        await reply.send(content | {"choices": [choice], "usage": usage} | extension)

    async def _generate(self, request: Json, reply: FakeReply) -> None:
        prompt = self._check_prompt(request.get("input_ids"))
        options: Any = request.get("sampling_params")
        need(isinstance(options, dict), "sampling_params must be an object")
        need(not set(options) - _SAMPLING, f"unknown sampling parameters {set(options) - _SAMPLING}")
        need(request.get("return_logprob") is True, "return_logprob must be true")
        max_tokens = options.get("max_new_tokens", 128)
        num_top = request.get("top_logprobs_num", 0)
        if request.get("stream") and len(prompt) + max_tokens > self.model.context:
            await reply.stream([{"error": {"message": "the context is too long"}}], 0)
            return
        if not request.get("stream"):
            drawn = await self._draw(prompt, options, max_tokens)
            await reply.send(self._event(prompt, drawn, drawn, num_top, self._finish(drawn, max_tokens)))
            return
        drawn = self.model.draw(prompt, options, max_tokens)
        events = []
        for end in range(1, len(drawn) + 1):
            finish = self._finish(drawn, max_tokens) if end == len(drawn) else None
            told = drawn[end - 1 : end] if self.is_incremental else drawn[:end]
            events.append(self._event(prompt, drawn[:end], told, num_top, finish))
        await reply.stream(events, self.delay_s)

    def _event(
        self, prompt: list[int], so_far: list[DrawnToken], told: list[DrawnToken], num_top: int, finish: Any
    ) -> Json:
        meta = self._meta(prompt, so_far) | {"finish_reason": finish, "output_token_logprobs": _entries(told)}
        if num_top:
            meta["output_top_logprobs"] = [[[p, i, None] for i, p in d.top[:num_top]] for d in told]
        return {"text": "", "output_ids": [d.token for d in told], "meta_info": meta}

    def _meta(self, prompt: list[int], drawn: list[DrawnToken]) -> Json:
        return {
            "id": "1",
            "prompt_tokens": len(prompt),
            "completion_tokens": len(drawn),
            "cached_tokens": 0,
            "weight_version": "7",
            "output_token_logprobs": _entries(drawn),
        }

    def _finish(self, drawn: list[DrawnToken], max_tokens: int) -> Json:
        if len(drawn) >= max_tokens:
            return {"type": "length", "length": max_tokens}
        return {"type": "stop", "matched": drawn[-1].token if drawn else None}


def _entries(drawn: list[DrawnToken]) -> list[list[Any]]:
    return [[d.logprob, d.token, f"<{d.token}>"] for d in drawn]
