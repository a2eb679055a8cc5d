"""SGLang as the upstream: its fields on the way out, its format on the way back."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.backends.refusal import refusal
from holdfast.backends.stream_reader import SGLangReader
from holdfast.backends.upstream import UpstreamBackend
from holdfast.backends.upstream_stream import Opened
from holdfast.backends.validation import CheckedReply, Entry, check_sglang, decoded
from holdfast.errors import UpstreamInvalid
from holdfast.generation import SamplingParams
from holdfast.sessions.ports import LogprobKind

GENERATE = "/generate"


class SGLangBackend(UpstreamBackend):
    default_kind = LogprobKind.SAMPLING

    def _chat_fields(self, body: Mapping[str, Any], input_ids: list[int], routed_from: int) -> dict[str, Any]:
        fields = {"input_ids": input_ids, "logprobs": True, "return_meta_info": True, "no_stop_trim": False}
        if self.config.routing_replay != "off":
            start = min(routed_from, len(input_ids)) if self.config.routing_replay == "additional" else 0
            fields |= {"return_routed_experts": True, "routed_experts_start_len": start}
        return fields

    def _check(self, body: bytes, input_ids: Sequence[int]) -> CheckedReply:
        return check_sglang(
            body,
            vocab_size=self._model.vocab_size,
            asked=self.asked_payloads,
            keep_payloads=self.config.keep_training_payloads,
            kind=self.logprob_kind,
        )

    async def _open_stream(self, prompt: list[int], params: SamplingParams, headers: Mapping[str, str]) -> Opened:
        request = {
            "input_ids": prompt,
            "sampling_params": _sampling(params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.top_logprobs,
            "stream": True,
        }
        events = await self.transport.stream(GENERATE, request | self._extra, headers)
        reader = SGLangReader(vocab_size=self._model.vocab_size, num_prompt=len(prompt), num_top=params.top_logprobs)
        return events, reader

    async def two_best(self, prompt: list[int], temperature: float) -> tuple[float, float]:
        request = {
            "input_ids": prompt,
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = await self.transport.post(GENERATE, request | self._extra, {})
        if answer.status != 200:
            raise refusal(answer.status, answer.body)
        tops = decoded(answer.body, _PROBED).meta_info.output_top_logprobs
        if not tops or len(tops[0]) < 2:
            raise UpstreamInvalid("two logprobs were asked for and did not come")
        return tops[0][0].logprob, tops[0][1].logprob


def _sampling(params: SamplingParams) -> dict[str, Any]:
    ends = sorted(params.eos_token_ids | params.stop_token_ids)
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "sampling_seed": (params.seed + params.choice) % 2**63,
        "stop_token_ids": ends or None,
        "ignore_eos": not ends,  # it would ignore stop tokens with it
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "skip_special_tokens": False,
    }


class _ProbeMeta(Struct):
    output_top_logprobs: list[list[Entry]]


class _SGLangProbe(Struct):
    meta_info: _ProbeMeta


_PROBED = msgspec.json.Decoder(_SGLangProbe)
