"""The upstreams that are held to the same promises: strict fakes, and a real vLLM or SGLang where one is named."""

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import UpstreamBackend, upstream_model_info
from holdfast.backends.vllm import GENERATE, VLLMBackend
from holdfast.config import UpstreamConfig
from holdfast.generation import Done, Event, Sampled, SamplingParams
from holdfast.testing.fake_servers import FakeSGLang, FakeVLLM
from holdfast.testing.fake_upstream import FakeModel, FakeUpstream

REAL_VLLM = os.environ.get("HOLDFAST_TEST_VLLM", "")
NAMES: tuple[str, ...] = ("sglang", "sglang_incremental", "vllm", "vllm_completions")
if REAL_VLLM:
    NAMES += ("real_vllm", "real_vllm_completions")
REAL_SGLANG = os.environ.get("HOLDFAST_TEST_SGLANG", "")
if REAL_SGLANG:
    NAMES += ("real_sglang",)
REAL_PROMPT = [1, 4093, 198, 2683, 354, 253, 1838]  # of the default model

MESSAGES = [{"role": "user", "content": "Tell me a story."}]


@dataclass(frozen=True)
class Case:
    """A backend in front of an upstream, a prompt that it can continue, and one that is too long for it."""

    backend: UpstreamBackend
    prompt: list[int]
    too_long: list[int]
    fake: FakeUpstream | None

    async def chat(self, **fields: Any) -> Any:
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0.0, **fields}
        return await self.backend.complete(body, self.prompt, session_id="s")

    async def generated(self, handle: int, params: SamplingParams, tokens: Sequence[int] = ()) -> "Generated":
        events: list[Event] = []
        async with self.backend.generate(handle, params, tokens) as stream:
            async for batch in stream:
                events += batch
        done = events[-1]
        assert isinstance(done, Done)
        return Generated([event for event in events if isinstance(event, Sampled)], done)


@dataclass(frozen=True)
class Generated:
    sampled: list[Sampled]
    done: Done

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.sampled]


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": max_tokens, "temperature": 0.0} | fields)


@contextlib.asynccontextmanager
async def sglang(fake: FakeSGLang | None = None, **options: Any) -> AsyncIterator[tuple[SGLangBackend, FakeSGLang]]:
    async with fake or FakeSGLang() as upstream:
        config = UpstreamConfig(**{"upstream": upstream.url, "upstream_timeout_s": 5.0} | options)
        model = upstream_model_info(name="ours", vocab_size=upstream.model.vocab_size, context=upstream.model.context)
        backend = SGLangBackend(config, model)
        try:
            yield backend, upstream
        finally:
            await backend.aclose()


@contextlib.asynccontextmanager
async def vllm(fake: FakeVLLM | None = None, **options: Any) -> AsyncIterator[tuple[VLLMBackend, FakeVLLM]]:
    async with fake or FakeVLLM() as upstream:
        config = UpstreamConfig(**{"upstream": upstream.url, "upstream_timeout_s": 5.0} | options)
        model = upstream_model_info(name="ours", vocab_size=upstream.model.vocab_size, context=upstream.model.context)
        backend = VLLMBackend(config, model)
        try:
            yield backend, upstream
        finally:
            await backend.aclose()


@contextlib.asynccontextmanager
async def opened(name: str) -> AsyncIterator[Case]:
    prompt, too_long = [5, 9, 33, 7], [5] * 5000
    if name.startswith("real_"):
        kind, url = (SGLangBackend, REAL_SGLANG) if name == "real_sglang" else (VLLMBackend, REAL_VLLM)
        backend = kind(UpstreamConfig(upstream=url), upstream_model_info(name="ours", vocab_size=49152))
        if name == "real_vllm_completions":
            backend.servers.all[0].unserved.add(GENERATE)
        try:
            yield Case(backend, REAL_PROMPT, too_long, None)
        finally:
            await backend.aclose()
    elif name.startswith("sglang"):
        fake = FakeSGLang(FakeModel(logprob_kind="sampling"), delay_s=0.001)
        fake.is_incremental = name == "sglang_incremental"
        async with sglang(fake) as (ours, upstream):
            yield Case(ours, prompt, too_long, upstream)
    else:
        other = FakeVLLM(delay_s=0.001)
        other.has_generate = name == "vllm"
        async with vllm(other) as (theirs, server):
            yield Case(theirs, prompt, too_long, server)
