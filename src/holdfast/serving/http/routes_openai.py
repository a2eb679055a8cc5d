"""Stateless OpenAI endpoints: each request is a session that lives for one reply."""

import time
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.events import ChatRequest
from holdfast.chats.grammar_queue import GrammarQueue
from holdfast.chats.stateless import StatelessReplies, StatelessRequest
from holdfast.chats.turn import check_fits, run_off_loop
from holdfast.errors import InvalidArgument, ModelNotFound
from holdfast.serving.http.bodies import decode_chat
from holdfast.serving.http.dialects.chat import ChatReplies
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.parse import (
    chat_request,
    checked_ids,
    prompts,
    sampling_params,
    stop_strings,
    unread_fields,
)
from holdfast.serving.http.reading import ChatCall, read_chat
from holdfast.serving.http.render import TextWriter
from holdfast.serving.http.response import StreamTimes, compiled_for, ignored_header, reply_response
from holdfast.serving.http.response_store import ResponseStore
from holdfast.serving.http.routes_responses import keeping, kept_past
from holdfast.serving.http.schema import ChatCompletion, Completion
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.runtime import Runtime


class OpenAIRoutes:
    def __init__(
        self,
        chat: ChatModel,
        runtime: Runtime,
        replies: StatelessReplies,
        grammars: GrammarQueue,
        *,
        store: ResponseStore,
        times: StreamTimes,
        as_sglang: bool = False,
        may_ignore: bool = True,
    ) -> None:
        self._chat = chat
        self._as_sglang = as_sglang
        self._may_ignore = may_ignore
        self._grammars = grammars
        self._metrics = runtime.metrics
        self._runtime = runtime
        self._replies = replies
        self._store = store
        self._unread = unread_fields(chat)
        self._times = times
        self._created = int(time.time())

    @property
    def _model(self) -> ModelInfo:
        """Not kept: an upstream may tell its context later."""
        return self._runtime.model

    async def chat_completions(self, request: Request) -> Response:
        call, chat_body = await self._read(request)
        body, raw = call.body, call.raw
        chat, model = self._chat, self._model
        if chat_body.recall is not None and chat_body.recall.tokens:
            raise InvalidArgument("recall quotes the past of a session; open one with POST /sessions", param="recall")
        pinned = None
        if body.input_ids is not None:
            ids, is_reasoning = checked_ids(body.input_ids, "input_ids", model), False
        else:
            messages, given = chat_body.messages, (chat_body.tools, chat_body.variables)
            fits = partial(check_fits, model=model, may_truncate=chat_body.may_truncate, at_least="at least ")
            prompt = await run_off_loop(partial(chat.continuation.first, messages, *given, fits), len(raw))
            ids, is_reasoning = prompt.ids, prompt.is_reasoning
            pinned = await run_off_loop(partial(chat.continuation.pinned, messages, model.max_pin, *given), len(raw))
        params = chat_body.params
        if not (body.max_completion_tokens or body.max_tokens):  # until the window is full
            params = replace(params, max_tokens=max(1, model.recent - len(ids)))
        stateless = StatelessRequest(
            prompts=[ids],
            params=params,
            new_reply=partial(
                chat.reply,
                stop=chat_body.stop,
                tools=chat_body.callable_tools,
                is_reasoning=is_reasoning and params.constraint is None,
            ),
            num_choices=body.n or 1,
            may_truncate=chat_body.may_truncate,
            pin_tokens=max(model.sink, pinned or 0),
        )
        return await reply_response(
            request,
            self._replies.replies(owner_of(request), stateless),
            keeping(self._store, owner_of(request), call),
            call.writer(model, chat.tokenizer),
            is_stream=bool(body.stream),
            with_usage=call.with_usage,
            times=self._times,
            headers=ignored_header(call.ignored, self._metrics),
        )

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the messages are, rendered as a whole."""
        call, chat_body = await self._read(request)
        given = (chat_body.messages, chat_body.tools, chat_body.variables)
        prompt = await run_off_loop(partial(self._chat.continuation.first, *given), len(call.raw))
        return JSONResponse({"input_tokens": len(prompt.ids)}, headers=ignored_header(call.ignored, self._metrics))

    async def _read(self, request: Request) -> tuple[ChatCall[ChatCompletion], ChatRequest]:
        earlier = partial(kept_past, self._store, owner_of(request))
        call = await read_chat(request, ChatCompletion, earlier, may_ignore=self._may_ignore, unread=self._unread)
        return call, await chat_request(
            call.body,
            self._chat,
            self._model,
            compiled=compiled_for(request, self._grammars),
            fields=call.decoded.fields,
            num_bytes=len(call.raw),
            as_sglang=self._as_sglang,
        )

    async def completions(self, request: Request) -> Response:
        raw = await request.body()
        decoded = await decode_chat(raw, Completion, may_ignore=self._may_ignore)
        body = decoded.body
        chat, model = self._chat, self._model
        stateless = StatelessRequest(
            prompts=await run_off_loop(partial(prompts, body, chat, model), len(raw)),
            params=sampling_params(
                body,
                model,
                max_tokens=body.max_tokens or 16,  # OpenAI's default for this endpoint
                top_logprobs=body.logprobs or 0,
                eos_token_ids=model.eos_token_ids,
            ),
            new_reply=partial(chat.text_reply, stop=stop_strings(body)),
            num_choices=body.n or 1,
            may_truncate=body.truncation == "auto",
            field="prompt",
        )
        writer = TextWriter(model=model.name, tokenizer=chat.tokenizer, with_logprobs=body.logprobs is not None)
        return await reply_response(
            request,
            self._replies.replies(owner_of(request), stateless),
            ChatReplies(),
            writer,
            is_stream=bool(body.stream),
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            times=self._times,
            headers=ignored_header(decoded.ignored, self._metrics),
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["model"]) != self._model.name:
            raise ModelNotFound(f"there is no model {name!r} here; this server has {self._model.name!r}")
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "holdfast",
            "max_model_len": self._model.sink + self._model.recent,
        }
