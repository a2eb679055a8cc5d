"""Strict fakes of SGLang and vLLM: each has its own endpoints and formats, and checks the fields that we must set."""

from typing import Any

from holdfast.testing.fake_upstream import DrawnToken, FakeReply, FakeUpstream, Handlers, Json, need

_SGLANG_SAMPLING = frozenset(
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
    """`is_incremental`: streamed events have only the new tokens, as with --incremental-streaming-output."""

    is_incremental = False

    def _routes(self) -> Handlers:
        return super()._routes() | {("POST", "/generate"): self._generate}

    async def _chat(self, request: Json, reply: FakeReply) -> None:
        max_tokens = self._check_chat(request, reply)
        prompt = self._check_prompt(request.get("input_ids"))
        need(request.get("return_meta_info") is True, "return_meta_info must be true")
        need(request.get("no_stop_trim") is False, "no_stop_trim must be false")
        start = request.get("routed_experts_start_len", 0)
        need(type(start) is int and 0 <= start <= len(prompt), "routed_experts_start_len is beyond the prompt")
        drawn = await self._draw(prompt, request, max_tokens)
        finish = _sglang_finish(drawn, max_tokens)
        meta = _sglang_meta(prompt, drawn) | {"finish_reason": finish}
        extension = {}
        if request.get("return_routed_experts") and self.routed_experts is not None:
            meta["routed_experts"] = self._experts(len(prompt) + len(drawn) - 1 - start)
            extension = {"sglext": {"routed_experts": meta["routed_experts"]}}
        if request.get("return_indexer_topk"):
            meta["indexer_topk"] = [[1, 2]] * (len(prompt) + len(drawn) - 1)
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": self._text(drawn),
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": {"content": [{"token": "x", "logprob": d.logprob} for d in drawn]},
            "finish_reason": finish["type"],
            "matched_stop": finish.get("matched"),
            "meta_info": meta,
        }
        about = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": self.model.name}
        await reply.send(about | {"choices": [choice], "usage": _usage(prompt, drawn)} | extension)

    async def _generate(self, request: Json, reply: FakeReply) -> None:
        prompt = self._check_prompt(request.get("input_ids"))
        options: Any = request.get("sampling_params")
        need(isinstance(options, dict), "sampling_params must be an object")
        unknown = set(options) - _SGLANG_SAMPLING
        need(not unknown, f"unknown sampling parameters {unknown}")
        need(request.get("return_logprob") is True, "return_logprob must be true")
        max_tokens = options.get("max_new_tokens", 128)
        num_top = request.get("top_logprobs_num", 0)
        if request.get("stream") and len(prompt) + max_tokens > self.model.context:
            await reply.stream([{"error": {"message": "the context is too long"}}], 0)
            return
        if not request.get("stream"):
            drawn = await self._draw(prompt, options, max_tokens)
            await reply.send(_sglang_event(prompt, drawn, drawn, num_top, _sglang_finish(drawn, max_tokens)))
            return
        drawn = self.model.draw(prompt, options, max_tokens)
        events = []
        for end in range(1, len(drawn) + 1):
            finish = _sglang_finish(drawn, max_tokens) if end == len(drawn) else None
            shown = drawn[end - 1 : end] if self.is_incremental else drawn[:end]
            events.append(_sglang_event(prompt, drawn[:end], shown, num_top, finish))
        await reply.stream(events, self.delay_s)


def _sglang_event(
    prompt: list[int], so_far: list[DrawnToken], shown: list[DrawnToken], num_top: int, finish: Any
) -> Json:
    meta = _sglang_meta(prompt, so_far) | {"finish_reason": finish, "output_token_logprobs": _entries(shown)}
    if num_top:
        meta["output_top_logprobs"] = [[[p, i, None] for i, p in d.top[:num_top]] for d in shown]
    return {"text": "", "output_ids": [d.token for d in shown], "meta_info": meta}


def _sglang_meta(prompt: list[int], drawn: list[DrawnToken]) -> Json:
    return {
        "id": "1",
        "prompt_tokens": len(prompt),
        "completion_tokens": len(drawn),
        "cached_tokens": 0,
        "weight_version": "7",
        "output_token_logprobs": _entries(drawn),
    }


def _sglang_finish(drawn: list[DrawnToken], max_tokens: int) -> Json:
    if len(drawn) >= max_tokens:
        return {"type": "length", "length": max_tokens}
    return {"type": "stop", "matched": drawn[-1].token if drawn else None}


def _entries(drawn: list[DrawnToken]) -> list[list[Any]]:
    return [[d.logprob, d.token, f"<{d.token}>"] for d in drawn]


class FakeVLLM(FakeUpstream):
    """`has_generate`: started with --enable-scale-out. `honours_ids`: uses our prompt, not its own rendering."""

    has_generate = True
    honours_ids = True

    def _routes(self) -> Handlers:
        return super()._routes() | {
            ("POST", "/v1/completions"): self._completions,
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
        content = [{"token": f"token_id:{d.token}", "logprob": d.logprob, "top_logprobs": []} for d in drawn]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self._text(drawn), "reasoning": None},
            "logprobs": {"content": content},
            "finish_reason": _vllm_finish(drawn, max_tokens),
            "stop_reason": None,
            "token_ids": [d.token for d in drawn],
            "routed_experts": self._experts(len(prompt) + len(drawn) - 1),
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
            choice = {"index": 0, "text": "", "logprobs": _vllm_lists(drawn, request["logprobs"])}
            await reply.send({"choices": [choice], "usage": _usage(prompt, drawn)})
            return
        _check_streamed(request)
        need(request.get("return_tokens_as_token_ids") is True, "return_tokens_as_token_ids must be true")
        events = []
        for index, one in enumerate(drawn):
            choice = _vllm_choice(drawn, index, max_tokens, request) | {"text": "x"}
            choice["logprobs"] = _vllm_lists([one], request["logprobs"])
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
        _check_streamed(request)
        assert options is not None
        max_tokens = options.get("max_tokens", 16)
        if len(prompt) + max_tokens > self.model.context:  # the real one has started its stream by then, too
            await reply.stream([{"error": {"message": "the context is too long", "code": 400}}], 0)
            return
        drawn = self.model.draw(prompt, options, max_tokens)
        events: list[Json] = []
        for index, one in enumerate(drawn):
            choice = _vllm_choice(drawn, index, max_tokens, options)
            top = [{"token_id": i, "logprob": p, "rank": 1} for i, p in _vllm_top(one, options["logprobs"])]
            position = {"token_id": one.token, "logprob": one.logprob, "rank": 1, "top_logprobs": top}
            choice["logprobs"] = {"content": [position]}
            events.append({"output_mode": "tokens", "usage": None, "choices": [choice]})
        if events:
            events[0]["prompt_token_ids"] = prompt
        await reply.stream([*events, {"choices": [], "usage": _usage(prompt, drawn)}], self.delay_s)


def _check_streamed(request: Json) -> None:
    need(request.get("stream") is True, "only streams are expected here")
    need(request.get("return_token_ids") is True, "return_token_ids must be true")
    need(request.get("stream_options") == {"include_usage": True}, "stream_options must include usage")


def _vllm_choice(drawn: list[DrawnToken], index: int, max_tokens: int, options: Json) -> Json:
    reason = _vllm_finish(drawn, max_tokens) if index == len(drawn) - 1 else None
    stop = drawn[index].token if reason == "stop" and options.get("ignore_eos") else None
    return {"index": 0, "finish_reason": reason, "stop_reason": stop, "token_ids": [drawn[index].token]}


def _vllm_finish(drawn: list[DrawnToken], max_tokens: int) -> str:
    return "length" if len(drawn) >= max_tokens else "stop"


def _vllm_top(drawn: DrawnToken, num: int) -> list[tuple[int, float]]:
    """The sampled token first, then the likeliest, as vLLM returns them."""
    return list(dict([(drawn.token, drawn.logprob), *drawn.top[:num]]).items())


def _vllm_lists(drawn: list[DrawnToken], num: int) -> dict[str, Any]:
    return {
        "tokens": [f"token_id:{d.token}" for d in drawn],
        "token_logprobs": [d.logprob for d in drawn],
        "top_logprobs": [{f"token_id:{i}": p for i, p in _vllm_top(d, num)} for d in drawn],
    }


def _usage(prompt: list[int], drawn: list[DrawnToken]) -> Json:
    return {"prompt_tokens": len(prompt), "completion_tokens": len(drawn), "total_tokens": len(prompt) + len(drawn)}
