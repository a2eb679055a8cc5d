"""vLLM as the upstream: its fields on the way out, its format on the way back."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.backends.refusal import NotServed, refusal
from holdfast.backends.stream_reader import VLLMReader
from holdfast.backends.upstream import UpstreamBackend
from holdfast.backends.upstream_stream import Opened
from holdfast.backends.validation import CheckedReply, check_vllm, decoded
from holdfast.errors import UpstreamInvalid
from holdfast.generation import SamplingParams
from holdfast.sessions.ports import LogprobKind

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


class VLLMBackend(UpstreamBackend):
    default_kind = LogprobKind.RAW

    has_generate = True  # until the server says otherwise

    def _chat_fields(self, body: Mapping[str, Any], input_ids: list[int], routed_from: int) -> dict[str, Any]:
        return {
            "kv_transfer_params": {"prompt_token_ids": input_ids},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": True,
            "top_logprobs": body.get("top_logprobs") or 0,
        }

    def _check(self, body: bytes, input_ids: Sequence[int]) -> CheckedReply:
        return check_vllm(
            body,
            input_ids=input_ids,
            vocab_size=self._model.vocab_size,
            asked=self.asked_payloads,
            keep_payloads=self.config.keep_training_payloads,
            kind=self.logprob_kind,
        )

    async def _open_stream(self, prompt: list[int], params: SamplingParams, headers: Mapping[str, str]) -> Opened:
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        events = None
        if self.has_generate:
            request = {"token_ids": prompt, "sampling_params": _sampling(params), **streamed}
            try:
                events = await self.transport.stream(GENERATE, self._named(request), headers)
            except NotServed:  # started without --enable-scale-out
                self.has_generate = False
        if events is None:
            request = {"prompt": prompt, "return_tokens_as_token_ids": True, **_sampling(params), **streamed}
            events = await self.transport.stream(COMPLETIONS, self._named(request), headers)
        reader = VLLMReader(
            vocab_size=self._model.vocab_size,
            prompt=prompt,
            num_top=params.top_logprobs,
            has_generate=self.has_generate,
        )
        return events, reader

    async def two_best(self, prompt: list[int], temperature: float) -> tuple[float, float]:
        request = {"prompt": prompt, "max_tokens": 1, "temperature": temperature, "logprobs": 2}
        answer = await self.transport.post(COMPLETIONS, self._named(request), {})
        if answer.status != 200:
            raise refusal(answer.status, answer.body)
        choices = decoded(answer.body, _PROBED).choices
        best = sorted(choices[0].logprobs.top_logprobs[0].values(), reverse=True) if choices else []
        if len(best) < 2:
            raise UpstreamInvalid("two logprobs were asked for and did not come")
        return best[0], best[1]

    def _named(self, request: dict[str, Any]) -> dict[str, Any]:
        name = {"model": self.upstream_model} if self.upstream_model else {}
        return name | request | self._extra


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": (params.seed + params.choice) % 2**63,
        "stop_token_ids": sorted(params.eos_token_ids | params.stop_token_ids),
        "ignore_eos": True,  # the session says what ends it
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "logprobs": params.top_logprobs,
        "skip_special_tokens": False,
    }


class _Logprobs(Struct):
    top_logprobs: list[dict[str, float]]


class _ProbeChoice(Struct):
    logprobs: _Logprobs


class _VLLMProbe(Struct):
    choices: list[_ProbeChoice]


_PROBED = msgspec.json.Decoder(_VLLMProbe)
