"""What each field of a request means, for the OpenAPI document. `Type.field` goes before `field`."""

DESCRIPTIONS = {
    # chat and text completions
    "messages": "The whole conversation, oldest message first. On a session only what is new is computed.",
    "prompt": "The text or token ids to continue; several prompts get a completion each.",
    "model": "Name of the model. The server has one and answers with it, whatever this says.",
    "stream": "Send the reply as server-sent events while it is generated.",
    "stream_options": "What a stream contains.",
    "n": "How many replies to generate. On a session it must be 1.",
    "max_tokens": "Longest reply, in tokens. Default: the window for chats, 16 for text completions.",
    "max_completion_tokens": "The same as `max_tokens`, and takes precedence.",
    "temperature": "0 always takes the likeliest token; higher values are more random. Default: 1.",
    "top_p": "Sample from the likeliest tokens whose probabilities add up to this. Default: 1, all tokens.",
    "top_k": "Sample from this many of the likeliest tokens; 0 or -1: all tokens.",
    "min_p": "Leave out tokens that are less likely than this fraction of the likeliest one.",
    "presence_penalty": "Subtracted from the logit of every token that the reply already contains.",
    "frequency_penalty": "Subtracted from the logit of a token, times how often the reply already contains it.",
    "repetition_penalty": "Divides the logits of tokens seen before (multiplies negative ones). Default: 1, none.",
    "logit_bias": "Added to the logits of tokens, by token id.",
    "seed": "The same seed, history and parameters give the same reply. Default: drawn at random.",
    "stop": "Up to 16 strings that end the reply; they are not part of it.",
    "stop_token_ids": "Token ids that end the reply.",
    "user": "A name for the end user. It is not used.",
    "truncation": "`auto`: a prompt beyond the window loses its oldest tokens. `disabled` (default): it is refused.",
    "logprobs": "Report the log probability of each sampled token.",
    "Completion.logprobs": "Report log probabilities: of each sampled token, and of this many alternatives.",
    "top_logprobs": "How many likely alternatives to report for each token; needs `logprobs`.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether the model may (`auto`), must (`required`, or one by name) or must not (`none`) call tools.",
    "parallel_tool_calls": "false: a forced call is one call.",
    "response_format": "Restrict the reply to JSON, or to JSON that fits a schema.",
    "chat_template_kwargs": "Variables for the chat template, such as `enable_thinking`.",
    "metadata": "Strings by name. They are kept with the session; a completion does not use them.",
    "modalities": "Only text can be generated.",
    "service_tier": "Accepted for compatibility; it has no effect.",
    "store": "Only false: completions without a session are not stored.",
    "input_ids": "The prompt as token ids, instead of `messages`. Not on a session.",
    "return_meta_info": "Add token ids and log probabilities to each choice as `meta_info`, as SGLang does.",
    "no_stop_trim": "Only false: stop strings are always removed.",
    "echo": "Only false: the prompt is not repeated.",
    "best_of": "Only 1.",
    "suffix": "Only empty: text is not inserted.",
    "include_usage": "End the stream with an event that has the token counts.",
    "include_obfuscation": "Only false: events are not padded.",
    "history": "`strict`: one conversation. `forest`: many, which begin, branch and run side by side as requests say.",
    # tools and formats
    "Tool.type": "Tools are functions.",
    "NamedTool.type": "Tools are functions.",
    "function": "The function.",
    "Function.name": "Name of the function, unique among the tools.",
    "NamedFunction.name": "Name of the function to call.",
    "JsonSchema.name": "A name for the schema. It is not used.",
    "description": "What it does, for the model to read.",
    "JsonSchema.description": "What the schema is for. It is not used.",
    "parameters": "JSON schema of the arguments.",
    "schema": "The JSON schema that the reply must fit.",
    "strict": "Accepted for compatibility: a schema is always followed exactly.",
    "Function.strict": "Accepted for compatibility; forced calls always follow `parameters`.",
    "ResponseFormat.type": "`text`, `json_object` (any JSON object) or `json_schema`.",
    "json_schema": "The schema, for the type `json_schema`.",
    # sessions
    "group": "A name that several sessions share, such as the rollouts of one prompt. It is in their samples.",
    "label": "A name for the session; lists can be filtered by it.",
    "Fork.label": "A name for the new session. Default: that of the original.",
    "pin_tokens": "First tokens that stay in the window. Default: the system prompt and tools, as far as they fit.",
    "session_ids": "Delete these closed sessions, whenever they were closed.",
    "older_than_s": "Delete sessions that were closed at least this many seconds ago. Default: by --retain-days.",
    "dry_run": "Only list what would be deleted.",
    "reward": "The reward, a finite number.",
    "turn": "Number of the turn that gets the reward, from 1 on. Default: the session.",
    "branch": "`tip`: a sample of the latest branch; `all`: one of each branch.",
    "max_seq_len": "Cut samples to this many tokens.",
    "min_weight_version": "Leave out of training what older weights sampled.",
    "SamplesRequest.metadata": "Values that are added to the metadata of each sample.",
    "num_layers": "Layers of the model, which gives routed experts that came as flat rows their shape.",
    "format": "File format of the samples.",
    "weight_version": "Version of the weights, which is recorded with each turn from now on.",
}


def describe(schemas: dict[str, dict[str, object]]) -> None:
    """Add descriptions to the properties of these schemas, in place."""
    for name, schema in schemas.items():
        properties = schema.get("properties", {})
        assert isinstance(properties, dict)
        for field, about in properties.items():
            if text := DESCRIPTIONS.get(f"{name}.{field}") or DESCRIPTIONS.get(field):
                about["description"] = text
