"""Request bodies to calls: sampling parameters, prompts, tools, template variables and grammars."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.grammar import Compilation
from holdfast.chat.template import RESERVED
from holdfast.chats.events import ChatRequest
from holdfast.chats.recall import RecallLimits
from holdfast.chats.turn import check_fits, run_off_loop
from holdfast.errors import InvalidArgument
from holdfast.generation import Constraint, SamplingParams
from holdfast.serving.http.schema import ChatCompletion, Completion, NamedTool, Recall, RelayedChat, Sampling, Tool
from holdfast.sessions.ports import ModelInfo

_MAX_PROMPTS = 64
_MAX_VARIABLES = 64
_STYLE = frozenset({"reasoning_effort", "verbosity"})  # of the reply; variables of templates that read them


async def chat_request(
    body: ChatCompletion,
    chat: ChatModel,
    model: ModelInfo,
    *,
    compiled: Callable[[Compilation], Awaitable[Constraint]],
    fields: Mapping[str, Any],
    num_bytes: int = 0,
    as_sglang: bool = False,
) -> ChatRequest:
    """Everything that is asked of one chat turn; `compiled` compiles its grammar."""
    if body.modalities and "text" not in body.modalities:
        raise InvalidArgument("modalities must contain text, which is all that is generated", param="modalities")
    _check_names(body.tools or [])
    tools = _tools(fields, as_sglang=as_sglang)
    callable_tools = _callable(body, tools)
    compilation = await run_off_loop(lambda: _compilation(body, callable_tools, chat), num_bytes)
    return ChatRequest(
        messages=body.messages,
        params=sampling_params(
            body,
            model,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_logprobs=_top_logprobs(body),
            constraint=await compiled(compilation) if compilation else None,
            eos_token_ids=chat.continuation.stop_token_ids,
        ),
        tools=tools,
        callable_tools=callable_tools,
        variables=template_variables(body, chat),
        stop=stop_strings(body),
        may_truncate=body.truncation == "auto",
        recall=recall_limits(body.recall),
        body=fields,
        num_bytes=num_bytes,
    )


def relayed_request(
    body: RelayedChat, chat: ChatModel, *, fields: Mapping[str, Any], num_bytes: int, as_sglang: bool = False
) -> ChatRequest:
    """What is asked of a turn that an upstream samples: how, is for it to read in `fields`."""
    return ChatRequest(
        messages=body.messages,
        params=SamplingParams(seed=0),
        tools=_tools(fields, as_sglang=as_sglang),
        variables=template_variables(body, chat),
        may_truncate=True,  # the upstream knows its own window
        recall=recall_limits(body.recall),
        body={name: value for name, value in fields.items() if name != "recall"},
        num_bytes=num_bytes,
    )


def recall_limits(given: Recall | bool | None) -> RecallLimits | None:
    """None: not given here."""
    if isinstance(given, Recall):
        return RecallLimits(given.tokens, given.passages)
    if given:
        raise InvalidArgument('recall must be false, or an object like {"tokens": 512, "passages": 8}', param="recall")
    return None if given is None else RecallLimits(0)


def sampling_params(
    body: Sampling,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    eos_token_ids: frozenset[int],
    top_logprobs: int = 0,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Sampling parameters with OpenAI's defaults. Without max_tokens a reply may fill the window once."""
    params = SamplingParams(
        seed=_seed(body.seed),
        max_tokens=max_tokens or model.recent,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, model.vocab_size),
        stop_token_ids=frozenset(checked_ids(body.stop_token_ids or [], "stop_token_ids", model)),
        eos_token_ids=eos_token_ids,
        top_logprobs=top_logprobs,
        constraint=constraint,
    )
    params.check_vocabulary(model.vocab_size)
    return params


def prompts(body: Completion, chat: ChatModel, model: ModelInfo) -> list[list[int]]:
    """The prompts of a text completion: one or several, as text or as ids."""
    raw = body.prompt
    many: Sequence[Any] = [raw] if isinstance(raw, str) or all(type(item) is int for item in raw) else raw
    if not raw or len(many) > _MAX_PROMPTS:
        raise InvalidArgument(f"prompt must contain 1 to {_MAX_PROMPTS} prompts, none of them empty", param="prompt")
    texts = [text for text in many if isinstance(text, str)]
    chat.tokenizer.check_size(sum(map(len, texts)), "prompt")
    for text in texts:
        fewest, may_truncate = chat.tokenizer.fewest_tokens(text), body.truncation == "auto"
        check_fits(fewest, model, may_truncate=may_truncate, field="prompt", at_least="at least ")
    return [
        _prompt(item, f"prompt[{index}]" if many is raw else "prompt", chat, model) for index, item in enumerate(many)
    ]


def _prompt(raw: Any, where: str, chat: ChatModel, model: ModelInfo) -> list[int]:
    if isinstance(raw, str):
        ids = chat.tokenizer.encode(raw)
    elif isinstance(raw, list) and all(type(token) is int for token in raw):
        ids = raw
    else:
        raise InvalidArgument(f"{where} must be text or a list of token ids", param=where)
    if not ids:
        raise InvalidArgument(f"{where} is empty", param=where)
    return checked_ids(ids, where, model)


def checked_ids(ids: list[int], where: str, model: ModelInfo) -> list[int]:
    for token in ids:
        if not 0 <= token < model.vocab_size:
            raise InvalidArgument(
                f"{where}: token id {token} is outside the vocabulary of {model.vocab_size}", param=where
            )
    return ids


def stop_strings(body: Sampling) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(63)
    if not -(2**63) <= seed < 2**64:
        raise InvalidArgument("seed must be a 64-bit integer", param="seed")
    return seed % 2**64


def _logit_bias(raw: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidArgument(f"logit_bias.{key} is not a token id of this model", param=f"logit_bias.{key}")
        biases[int(key)] = bias
    return biases


def _top_logprobs(body: ChatCompletion) -> int:
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("top_logprobs requires logprobs: true", param="top_logprobs")
    return body.top_logprobs or 0


def unread_fields(chat: ChatModel) -> frozenset[str]:
    """Known fields of a chat that have no effect on this model, as its template does not read them."""
    return _STYLE - chat.template.variables


def template_variables(body: ChatCompletion | RelayedChat, chat: ChatModel) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if len(given) > _MAX_VARIABLES:
        where = "chat_template_kwargs"
        raise InvalidArgument(f"{where} may have at most {_MAX_VARIABLES} variables, got {len(given)}", param=where)
    for name in given:
        if name in RESERVED or not name.isidentifier():
            where = f"chat_template_kwargs.{name}"
            raise InvalidArgument(f"{where} is not a variable that a request may set", param=where)
    style = {name: getattr(body, name) for name in _STYLE & chat.template.variables}
    return {**chat.variables, **{name: value for name, value in style.items() if isinstance(value, str)}, **given}


def _check_names(raw: Sequence[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(raw):
        if (name := tool.function.name) in names:
            where = f"tools[{index}].function.name"
            raise InvalidArgument(f"{where} repeats {name!r}", param=where)
        names.add(name)


def _tools(fields: Mapping[str, Any], *, as_sglang: bool) -> tuple[dict[str, Any], ...]:
    """The tools as they are rendered: as the client wrote them, or as SGLang and so miles would write them."""
    tools = fields.get("tools") or ()
    return tuple(map(_sglang_tool, tools)) if as_sglang else tuple(tools)


def _sglang_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The order and the defaults of `Tool` and `Function` in SGLang's entrypoints/openai/protocol.py, dumped."""
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return tool
    order = {"description": None, "name": None, "parameters": None, "strict": False}
    return {
        "type": tool.get("type", "function"),
        "function": {name: function.get(name, default) for name, default in order.items()},
    }


def _callable(body: ChatCompletion, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    choice = body.tool_choice
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    if not tools:
        raise InvalidArgument("tool_choice requires tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in tools if tool["function"]["name"] == choice.function.name)
        if not named:
            raise InvalidArgument(
                f"tool_choice.function.name: {choice.function.name!r} is not in tools",
                param="tool_choice.function.name",
            )
        return named
    return tools


def _compilation(
    body: ChatCompletion, callable_tools: tuple[dict[str, Any], ...], chat: ChatModel
) -> Compilation | None:
    must_call = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    kind = body.response_format.type if body.response_format else "text"
    if kind == "text" and not must_call:
        return None
    if must_call and kind != "text":
        raise InvalidArgument("response_format cannot be combined with a forced tool call", param="response_format")
    if must_call:
        is_one = isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False
        return chat.forced_call(callable_tools, is_one=is_one)
    if kind == "json_object":
        return chat.grammars.json_object()
    assert body.response_format is not None
    if body.response_format.json_schema is None or body.response_format.json_schema.schema is None:
        where = "response_format.json_schema.schema"
        raise InvalidArgument(f"{where} is required", param=where)
    return chat.grammars.json_schema(body.response_format.json_schema.schema)
