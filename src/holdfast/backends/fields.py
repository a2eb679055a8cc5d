"""Which fields of a chat request go to the upstream: those that affect nothing but the result of their own request."""

from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigError, InvalidArgument

_OPENAI = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop temperature top_p tools tool_choice parallel_tool_calls
    reasoning_effort
"""
# What SGLang and vLLM add to it
_SAMPLING = """
    top_k min_p min_tokens repetition_penalty repetition_detection stop_token_ids stop_regex ignore_eos bad_words
    allowed_token_ids thinking_token_budget
"""
_CONSTRAINTS = """
    regex ebnf structured_outputs guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern
"""
_REPLY = """
    chat_template_kwargs skip_special_tokens spaces_between_special_tokens include_stop_str_in_output no_stop_trim
    separate_reasoning stream_reasoning include_reasoning prompt_logprobs logprob_token_ids return_meta_info
    return_token_ids return_tokens_as_token_ids return_prompt_token_ids return_cached_tokens_details
    return_routed_experts routed_experts_start_len return_indexer_topk
"""
# OpenAI clients send these, and they have no effect here: accepted, and left out.
_WITHOUT_EFFECT = """
    stream stream_options user store metadata service_tier prompt_cache_key prompt_cache_retention safety_identifier
    verbosity modalities truncation
"""
# These change what is sampled: where they cannot be honoured they are refused, never left out.
_CHANGES_REPLY = """
    messages prompt audio functions function_call lora_path lora_name lora_id chat_template continue_final_message
    kv_transfer_params custom_logit_processor custom_params logits_processors vllm_xargs session_params
    truncate_prompt_tokens prompt_embeds input_embeds use_beam_search length_penalty
"""
DECISIVE = frozenset((_SAMPLING + _CONSTRAINTS + _CHANGES_REPLY).split())
FORWARDED = frozenset((_OPENAI + _SAMPLING + _CONSTRAINTS + _REPLY).split())
IGNORED = frozenset(_WITHOUT_EFFECT.split())
_OURS = frozenset({"stream", "stream_options", "input_ids", "kv_transfer_params"})  # set by us, or not sent


def parse_fields(text: str) -> frozenset[str]:
    """The fields that are always forwarded, and those of a comma-separated list."""
    further = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for name in further:
        if not name.isidentifier() or name in _OURS:
            raise ConfigError(f"forward_fields: {name!r} is not a field that can be forwarded")
    return FORWARDED | further


def left_out(body: Mapping[str, Any], forwarded: frozenset[str], *, may_ignore: bool) -> list[str]:
    """The fields that are neither forwarded nor without effect. null is the same as absent.

    InvalidArgument for one that changes what is sampled and, unless they may be ignored, for any.
    """
    names = [name for name, value in body.items() if value is not None and name not in forwarded | IGNORED]
    for name in names:
        if not may_ignore or (name in DECISIVE and body[name]):
            raise InvalidArgument(
                f"{name} is not a field that this server sends to its upstream; "
                "leave it out, or start the server with it in --forward-fields",
                param=name,
            )
    return names
