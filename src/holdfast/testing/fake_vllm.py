"""A strict fake vLLM."""

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.testing.fake_model import DrawnToken
from holdfast.testing.fake_upstream import FakeReply, FakeUpstream, Json, need


class FakeVLLM(FakeUpstream):
    """`has_generate`: started with --enable-scale-out. `honours_ids`: takes our prompt, not its own rendering."""

    has_generate = True
    honours_ids = True

    def _routes(self) -> dict[tuple[str, str], Callable[[Json, FakeReply], Awaitable[None]]]:
        return {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completions,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/inference/v1/generate"): self._generate,
        }

    async def _chat(self, request: Json, reply: FakeReply) -> None:
        max_tokens = self._check_chat(request, reply)
        transfer = request.get("kv_transfer_params")
        need(isinstance(transfer, dict), "kv_transfer_params is missing")
        prompt = self._check_prompt((transfer or {}).get("prompt_token_ids"))
        if not self.honours_ids:
            prompt = [1, 2, 3]
        need(request.get("return_token_ids") is True, "return_token_ids must be true")
        need(request.get("return_tokens_as_token_ids") is True, "return_tokens_as_token_ids must be true")
        need(type(request.get("top_logprobs")) is int, "top_logprobs must be a number")
        need(len(prompt) + max_tokens <= self.model.context, "the context is too long")
        drawn = await self._draw(prompt, request, max_tokens)
        text = self.model.decode([d.token for d in drawn if d.token != self.model.eos_token_id])
        content = [{"token": f"token_id:{d.token}", "logprob": d.logprob, "top_logprobs": []} for d in drawn]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "reasoning": None},
            "logprobs": {"content": content},
            "finish_reason": _finish(drawn, max_tokens),
            "stop_reason": None,
            "token_ids": [d.token for d in drawn],
            "routed_experts": self.routed_experts,
        }
        about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": self.model.name}
        rest = {"choices": [choice], "usage": _usage(prompt, drawn), "prompt_token_ids": prompt}
        await reply.send(about | rest)

    async def _completions(self, request: Json, reply: FakeReply) -> None:
        prompt, max_tokens = self._check_prompt(request.get("prompt")), request.get("max_tokens", 16)
        need(type(request.get("logprobs")) is int, "logprobs must be a number")
        need(len(prompt) + max_tokens <= self.model.context, "the context is too long")
        drawn = self.model.draw(prompt, request, max_tokens)
        if not request.get("stream"):
            choice = {"index": 0, "text": "", "logprobs": _lists(drawn, request["logprobs"])}
            await reply.send({"choices": [choice], "usage": _usage(prompt, drawn)})
            return
        self._check_streamed(request)
        need(request.get("return_tokens_as_token_ids") is True, "return_tokens_as_token_ids must be true")
        events = []
        for index, one in enumerate(drawn):
            choice = self._choice(drawn, index, max_tokens, request) | {"text": "x"}
            choice["logprobs"] = _lists([one], request["logprobs"])
            choice["prompt_token_ids"] = prompt if index == 0 else None
            events.append({"choices": [choice]})
        await reply.stream([*events, {"choices": [], "usage": _usage(prompt, drawn)}], self.delay_s)

    async def _generate(self, request: Json, reply: FakeReply) -> None:
        if not self.has_generate:
            error = {"message": "Scale-out endpoints are disabled.", "code": 403}
            await reply.send({"error": error}, status=403)
            return
        prompt, options = self._check_prompt(request.get("token_ids")), request.get("sampling_params")
        need(isinstance(options, dict), "sampling_params must be an object")
        need(type((options or {}).get("logprobs")) is int, "logprobs must be a number")
        self._check_streamed(request)
        assert options is not None
        max_tokens = options.get("max_tokens", 16)
        if len(prompt) + max_tokens > self.model.context:  # the real one has begun its stream by then, too
            await reply.stream([{"error": {"message": "the context is too long", "code": 400}}], 0)
            return
        drawn = self.model.draw(prompt, options, max_tokens)
        events: list[Json] = []
        for index, one in enumerate(drawn):
            choice = self._choice(drawn, index, max_tokens, options)
            top = [{"token_id": i, "logprob": p, "rank": 1} for i, p in _top(one, options["logprobs"])]
            position = {"token_id": one.token, "logprob": one.logprob, "rank": 1, "top_logprobs": top}
            choice["logprobs"] = {"content": [position]}
            events.append({"output_mode": "tokens", "usage": None, "choices": [choice]})
        if events:
            events[0]["prompt_token_ids"] = prompt
        await reply.stream([*events, {"choices": [], "usage": _usage(prompt, drawn)}], self.delay_s)

    def _check_streamed(self, request: Json) -> None:
        need(request.get("stream") is True, "only streams are expected here")
        need(request.get("return_token_ids") is True, "return_token_ids must be true")
        need(request.get("stream_options") == {"include_usage": True}, "usage must be asked for")

    def _choice(self, drawn: list[DrawnToken], index: int, max_tokens: int, options: Json) -> Json:
        is_last = index == len(drawn) - 1
        reason = _finish(drawn, max_tokens) if is_last else None
        stop = drawn[index].token if reason == "stop" and options.get("ignore_eos") else None
        return {"index": 0, "finish_reason": reason, "stop_reason": stop, "token_ids": [drawn[index].token]}


def _finish(drawn: list[DrawnToken], max_tokens: int) -> str:
    return "length" if len(drawn) >= max_tokens else "stop"


def _usage(prompt: list[int], drawn: list[DrawnToken]) -> Json:
    return {"prompt_tokens": len(prompt), "completion_tokens": len(drawn), "total_tokens": len(prompt) + len(drawn)}


def _top(drawn: DrawnToken, num: int) -> list[tuple[int, float]]:
    """The sampled token first, then the likeliest, as vLLM has it."""
    return list(dict([(drawn.token, drawn.logprob), *drawn.top[:num]]).items())


def _lists(drawn: list[DrawnToken], num: int) -> dict[str, Any]:
    return {
        "tokens": [f"token_id:{d.token}" for d in drawn],
        "token_logprobs": [d.logprob for d in drawn],
        "top_logprobs": [{f"token_id:{i}": p for i, p in _top(d, num)} for d in drawn],
    }
