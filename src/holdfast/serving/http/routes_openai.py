"""Stateless endpoints: each request is one single-shot session."""

import time
from dataclasses import replace
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.stateless import StatelessReplies, StatelessRequest
from holdfast.off_loop import run_off_loop
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.parse import chat_request, checked_ids, prompts, sampling_params, stop_strings
from holdfast.serving.http.render import ChatWriter, TextWriter
from holdfast.serving.http.reply_response import Outgoing, answer
from holdfast.serving.http.schema import ChatCompletion, Completion, decode
from holdfast.sessions.ports import ModelInfo


class OpenAIRoutes:
    def __init__(self, chat: ChatModel, model: ModelInfo, shots: StatelessReplies) -> None:
        self._chat = chat
        self._model = model
        self._shots = shots
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        raw = await request.body()
        body = decode(raw, ChatCompletion)
        chat, model = self._chat, self._model
        asked = await chat_request(body, chat, model)
        pinned = None
        if body.input_ids is not None:
            ids, is_reasoning = checked_ids(body.input_ids, "input_ids", model), False
        else:
            first, pinning, given = chat.continuation.first, chat.continuation.pinned, (asked.tools, asked.variables)
            prompt = await run_off_loop(partial(first, asked.messages, *given), len(raw))
            ids, is_reasoning = prompt.ids, prompt.is_reasoning
            pinned = await run_off_loop(partial(pinning, asked.messages, model.max_pin, *given), len(raw))
        params = asked.params
        if not (body.max_completion_tokens or body.max_tokens):  # until the window is full
            params = replace(params, max_tokens=max(1, model.recent - len(ids)))
        shot = StatelessRequest(
            prompts=[ids],
            params=params,
            new_answer=partial(
                chat.reply,
                stop=asked.stop,
                tools=asked.callable_tools,
                is_reasoning=is_reasoning and params.constraint is None,
            ),
            num_choices=body.n or 1,
            may_truncate=asked.may_truncate,
            pin_tokens=max(model.sink, pinned or 0),
        )
        writer = ChatWriter(
            model=model.name,
            tokenizer=chat.tokenizer,
            with_logprobs=bool(body.logprobs),
            with_meta_info=bool(body.return_meta_info),
        )
        return await answer(request, body, Outgoing(self._shots.replies(owner_of(request), shot), writer))

    async def completions(self, request: Request) -> Response:
        raw = await request.body()
        body = decode(raw, Completion)
        chat, model = self._chat, self._model
        shot = StatelessRequest(
            prompts=await run_off_loop(partial(prompts, body, chat, model), len(raw)),
            params=sampling_params(
                body,
                model,
                max_tokens=body.max_tokens or 16,  # OpenAI's default for this endpoint
                top_logprobs=body.logprobs or 0,
                eos_token_ids=model.eos_token_ids,
            ),
            new_answer=partial(chat.text_reply, stop=stop_strings(body)),
            num_choices=body.n or 1,
            may_truncate=body.truncation == "auto",
            field="prompt",
        )
        writer = TextWriter(model=model.name, tokenizer=chat.tokenizer, with_logprobs=body.logprobs is not None)
        return await answer(request, body, Outgoing(self._shots.replies(owner_of(request), shot), writer))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self._model.name:
            raise HTTPException(404)
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "holdfast",
            "max_model_len": self._model.sink + self._model.recent,
        }
