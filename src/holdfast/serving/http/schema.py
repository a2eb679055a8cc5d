"""The types of request bodies."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from holdfast.sessions.limits import MAX_BIASES, MAX_ENTRIES, MAX_IDS, MAX_LABEL, MAX_NAME, MAX_VALUE

MAX_STOPS = 16
_Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_MaxTokens = Annotated[int, Meta(ge=1, le=2**63 - 1)]  # lowered to what fits
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
_Stops = _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
_Label = Annotated[str, Meta(max_length=MAX_LABEL)]
_Value = Annotated[str, Meta(max_length=MAX_VALUE)]
_Metadata = Annotated[dict[Annotated[str, Meta(max_length=MAX_NAME)], _Value], Meta(max_length=MAX_ENTRIES)]


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: _Name


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Recall(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    passages: Annotated[int, Meta(ge=1, le=64)] = 8


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share."""

    model: _Value | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: _MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    logit_bias: Annotated[dict[str, _Number], Meta(max_length=MAX_BIASES)] | None = None
    seed: int | None = None
    stop: _Stops = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=MAX_IDS)] | None = None
    user: _Value | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ChatCompletion(Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: list[Any]
    max_completion_tokens: _MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: _Metadata | None = None
    modalities: Annotated[list[_Value], Meta(max_length=MAX_ENTRIES)] | None = None
    reasoning_effort: _Label | None = None
    verbosity: _Label | None = None
    service_tier: _Value | None = None
    store: bool | None = None
    prompt_cache_key: _Value | None = None
    prompt_cache_retention: _Value | None = None
    safety_identifier: _Value | None = None
    input_ids: Annotated[list[_TokenId], Meta(min_length=1)] | None = None
    return_meta_info: bool | None = None
    no_stop_trim: Literal[False] | None = None
    recall: Recall | bool | None = None


class Completion(Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None


class RelayedChat(Struct, kw_only=True):
    """What we must know of a chat that an upstream answers; it judges the other fields."""

    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    verbosity: Any = None
    input_ids: list[Any] | None = None
    recall: Recall | bool | None = None


class Reward(Struct, kw_only=True, forbid_unknown_fields=True):
    reward: float
    turn: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class WeightVersion(Struct, kw_only=True, forbid_unknown_fields=True):
    weight_version: Annotated[str, Meta(max_length=256)]


class WeightsUpload(Struct, kw_only=True, forbid_unknown_fields=True):
    """Query parameters where the body is a file."""

    version: Annotated[str, Meta(min_length=1, max_length=256)]
    caches: Literal["keep", "recompute"] = "recompute"


class WeightsAtPath(WeightsUpload):
    path: Annotated[str, Meta(min_length=1, max_length=4096)]


class SamplesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    branch: Literal["tip", "all"] = "tip"
    max_seq_len: _Count | None = None
    min_weight_version: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    metadata: dict[str, Any] | None = None
    num_layers: _Count | None = None
    weight_versions: Literal["names", "spans"] | None = None
    format: Literal["safetensors", "json", "parquet"] = "safetensors"


class NewSession(Struct, kw_only=True, forbid_unknown_fields=True):
    group: _Label | None = None
    label: _Label | None = None
    metadata: _Metadata | None = None
    pin_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    history: Literal["strict", "forest"] | None = None
    recall: Recall | bool | None = None


class Fork(Struct, kw_only=True, forbid_unknown_fields=True):
    label: _Label | None = None
    turn: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class Purge(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which closed sessions to delete: these ids, or those closed that long ago; else those past retention."""

    session_ids: Annotated[list[_Value], Meta(min_length=1, max_length=100_000)] | None = None
    older_than_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    dry_run: bool = False
