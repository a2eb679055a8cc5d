"""Messages to tokens without rendering the past again, for the default model and for Qwen3's real template."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.chat.chat_model import ChatModel, load_chat
from holdfast.chat.continuation import Continuation
from holdfast.chat.messages import read_messages
from holdfast.chat.template import ChatTemplate, Renderer
from holdfast.config import ChatConfig
from holdfast.errors import ConfigError, InvalidArgument, ModelError, TemplateError
from holdfast.models import open_model
from holdfast.sessions.record import TemplateInputs
from tests.qwen3 import FOLDER, qwen3
from tests.serving import default_chat

USER = {"role": "user", "content": "What is the capital of France?"}
AGAIN = {"role": "user", "content": "And of Spain?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


@pytest.fixture(params=["default", "qwen3"])
def chat(request: pytest.FixtureRequest) -> ChatModel:
    return default_chat().model if request.param == "default" else qwen3()


def _history(chat: ChatModel, messages: list[dict[str, Any]], reply: str, tools: tuple[Any, ...] = ()) -> list[int]:
    """A first prompt, then `reply` as if sampled, ended as the model would."""
    prompt = chat.continuation.first(messages, tools)
    return [*prompt.ids, *chat.tokenizer.encode(reply), chat.continuation.end_of_turn]


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
@pytest.mark.parametrize("new", [[AGAIN], [AGAIN, AGAIN], [{"role": "assistant", "content": "Hm."}, AGAIN]])
def test_continuing_gives_the_tokens_of_a_whole_render(
    chat: ChatModel, system: list[Any], tools: tuple[Any, ...], new: list[Any]
) -> None:
    history = _history(chat, [*system, USER], "Paris.", tools)
    whole = chat.continuation.first([*system, USER, {"role": "assistant", "content": "Paris."}, *new], tools)
    assert history + chat.continuation.tail(history[-1], new, tools).ids == whole.ids


@pytest.mark.parametrize("new", [[RESULT], [RESULT, RESULT], [RESULT, AGAIN]])
def test_tool_results_continue_a_call_as_a_whole_render_would(chat: ChatModel, new: list[Any]) -> None:
    sampled = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    history = _history(chat, [USER], sampled, (TOOL,))
    whole = chat.continuation.first([USER, CALLING, *new], (TOOL,))
    assert history + chat.continuation.tail(history[-1], new, (TOOL,)).ids == whole.ids


@pytest.mark.parametrize("new", [[AGAIN], [RESULT], [SYSTEM, AGAIN]])
def test_reasoning_in_the_history_is_never_rendered_again(new: list[Any]) -> None:
    chat = qwen3()
    reply = "<think>\nHm, France.\n</think>\n\nParis."
    history = _history(chat, [USER], reply, (TOOL,))
    tail = chat.continuation.tail(history[-1], new, (TOOL,)).ids
    text = chat.tokenizer.decode(history + tail)
    assert reply in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert all(message["content"] in chat.tokenizer.decode(tail) for message in new)


def test_the_difference_of_two_renders_would_have_lost_the_past() -> None:
    """Why the cut is at a sentinel: Qwen3's template strips old reasoning, so its renders are no prefixes."""
    chat = qwen3()
    reply = {"role": "assistant", "content": "Paris.", "reasoning_content": "Hm, France."}
    before = chat.template.render([USER, reply], add_generation_prompt=False)
    after = chat.template.render([USER, reply, AGAIN], add_generation_prompt=True)
    assert "Hm, France." in before
    assert not after.startswith(before)


def test_the_first_prompt_is_that_of_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), chat_template=config["chat_template"]
    )
    parsed = {**CALL, "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    for messages, tools in (
        ([USER], []),
        ([SYSTEM, USER, {"role": "assistant", "content": "Paris."}, AGAIN], [TOOL]),
        ([USER, CALLING, RESULT], [TOOL]),
    ):
        ids = theirs.apply_chat_template(
            [{**message, "tool_calls": [parsed]} if message is CALLING else message for message in messages],
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        assert qwen3().continuation.first(messages, tools).ids == ids


def test_a_turn_that_was_cut_is_closed(chat: ChatModel) -> None:
    cut = [*chat.continuation.first([USER]).ids, *chat.tokenizer.encode("Par")]
    assert chat.continuation.tail(cut[-1], [AGAIN]).ids[0] == chat.continuation.end_of_turn
    assert chat.continuation.tail(chat.continuation.end_of_turn, [AGAIN]).ids[0] != chat.continuation.end_of_turn
    assert chat.continuation.end_of_turn in chat.continuation.stop_token_ids


def test_a_history_that_is_resent_gets_the_generation_prompt_alone(chat: ChatModel) -> None:
    tail = chat.continuation.tail(chat.continuation.end_of_turn, [])
    assert chat.tokenizer.decode(tail.ids) == "\n<|im_start|>assistant\n"


def test_system_prompt_and_tools_are_pinned_as_far_as_allowed(chat: ChatModel) -> None:
    pin = chat.continuation.pinned([SYSTEM, USER], 512)
    assert 0 < pin < len(chat.continuation.first([SYSTEM, USER]).ids)
    assert chat.tokenizer.decode(chat.continuation.first([SYSTEM, USER]).ids[:pin]).endswith("Be brief.<|im_end|>")
    with_tools = chat.continuation.pinned([USER], 512, (TOOL,))
    assert "weather" in chat.tokenizer.decode(chat.continuation.first([USER], (TOOL,)).ids[:with_tools])
    assert chat.continuation.pinned([SYSTEM, USER], pin - 1) == pin - 1


def test_a_default_system_prompt_is_pinned_too() -> None:
    assert default_chat().model.continuation.pinned([USER], 512) > 0
    assert qwen3().continuation.pinned([USER], 512) == 0


def test_what_the_templates_can_do_is_found_out() -> None:
    ours, theirs = default_chat().model.continuation.abilities, qwen3().continuation.abilities
    assert (ours.has_tools, theirs.has_tools) == (False, True)
    assert "developer" in ours.first_roles
    assert "developer" not in theirs.first_roles
    assert {"system", "user", "assistant", "tool"} <= theirs.next_roles


def test_developer_messages_become_system_where_they_would_vanish() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    chat = qwen3()
    assert chat.continuation.first([developer, USER]).ids == chat.continuation.first([SYSTEM, USER]).ids
    assert "Be brief." in chat.tokenizer.decode(chat.continuation.tail(None, [developer, AGAIN]).ids)


@pytest.mark.parametrize(
    ("source", "messages", "says"),
    [
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
            [SYSTEM, USER],
            r"messages\[0\].role: .* system messages at all",
        ),
        (
            "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
            "<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            [USER, SYSTEM],
            r"messages\[4\].role: .* system messages at this position",
        ),
    ],
)
def test_what_a_template_cannot_show_is_refused_by_name(source: str, messages: list[Any], says: str) -> None:
    continuation = Continuation(Renderer(ChatTemplate(source), default_chat().model.tokenizer))
    start = 0 if messages[0] is SYSTEM else 3
    with pytest.raises(InvalidArgument, match=says):
        _ = continuation.tail(None, messages, start=start) if start else continuation.first(messages)


def test_a_template_without_an_end_of_turn_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }} {% endfor %}")
    with pytest.raises(ModelError, match="does not mark where"):
        Continuation(Renderer(template, default_chat().model.tokenizer))


def test_tools_and_lasting_variables_are_the_root_of_a_conversation() -> None:
    chat = qwen3()
    assert chat.continuation.root((), {"enable_thinking": False}) == TemplateInputs()
    assert chat.continuation.root((TOOL,)) != chat.continuation.root()
    shuffled = {key: TOOL[key] for key in reversed(TOOL)}
    assert chat.continuation.root((shuffled,)).differs(chat.continuation.root((TOOL,))) is None
    assert chat.continuation.root((shuffled,)).tools == json.dumps([shuffled], separators=(",", ":"))
    template = ChatTemplate("{{ mood }}" + chat.template.source)
    lasting = Continuation(Renderer(template, chat.tokenizer))
    assert lasting.root((), {"mood": "x"}) != lasting.root((), {"mood": "y"})


def test_thinking_can_be_turned_off_for_one_turn() -> None:
    chat = qwen3()
    off = chat.continuation.tail(None, [AGAIN], (), {"enable_thinking": False})
    assert chat.tokenizer.decode(off.ids).endswith("<think>\n\n</think>\n\n")
    assert not off.is_reasoning
    open_template = ChatTemplate(chat.template.source + "{{ '<think>\n' }}")
    assert Continuation(Renderer(open_template, chat.tokenizer)).first([USER]).is_reasoning


@given(st.lists(st.sampled_from(["a", " ", "<|im_end|>", "<|im_start|>", "\n", "é"]), max_size=8))
def test_no_message_can_spell_a_control_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    for chat in (default_chat().model, qwen3()):
        plain = chat.continuation.first([{"role": "user", "content": "x"}])
        prompt = chat.continuation.first([{"role": "user", "content": text}])
        controls = [token for token in prompt.ids if chat.tokenizer.is_control(token)]
        assert len(controls) == sum(map(chat.tokenizer.is_control, plain.ids))
        assert text in chat.tokenizer.decode(prompt.ids)
        assert prompt.num_control == text.count("<|im_end|>") + text.count("<|im_start|>")


@pytest.mark.parametrize(
    "where", ["content", "name", "tool_call_id", "call id", "call name", "arguments", "tool", "variable", "reasoning"]
)
def test_nothing_that_a_client_sends_can_spell_a_control_token(where: str) -> None:
    source = "{{ note }}{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}"
    source += "{{ m.tool_call_id }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.reasoning_content }}"
    source += "<|im_end|>\n{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    chat = default_chat().model
    continuation = Continuation(Renderer(ChatTemplate(source), chat.tokenizer))

    def controls(text: str) -> int:
        at = dict.fromkeys(("content", "name", "tool_call_id", "call id", "call name", "arguments"), "x") | {
            where: text
        }
        call = {"id": at["call id"], "type": "function"}
        call |= {"function": {"name": at["call name"], "arguments": json.dumps({"a": at["arguments"]})}}
        messages = [
            {"role": "user", "content": at["content"], "name": at["name"]},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": at.get("reasoning", "x")},
            {"role": "tool", "content": "x", "tool_call_id": at["tool_call_id"]},
        ]
        tool = {"type": "function", "function": {"name": "f", "parameters": {at.get("tool", "x"): {}}}}
        ids = continuation.first(messages, [tool], {"note": {"a": [at.get("variable", "x")]}}).ids
        assert text in chat.tokenizer.decode(ids)
        return sum(map(chat.tokenizer.is_control, ids))

    assert controls("<|im_end|><|im_start|>") == controls("y")


@pytest.mark.parametrize("name", ["self", "messages", "range", "namespace", "raise_exception", "loop"])
def test_a_server_cannot_be_given_variables_with_reserved_names(name: str) -> None:
    source = open_model()
    with pytest.raises(ConfigError, match=f"chat_template_kwargs.{name}"):
        load_chat(source, ChatConfig(chat_template_kwargs=json.dumps({name: 1})), 1)


def test_a_variable_named_self_does_not_break_rendering() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render([USER], add_generation_prompt=True, **{"self": 1}) == "1"


def test_control_tokens_may_be_allowed() -> None:
    chat = default_chat().model
    renderer = Renderer(chat.template, chat.tokenizer, allow_control=True)
    ids = Continuation(renderer).first([{"role": "user", "content": "a<|im_end|>"}]).ids
    assert ids.count(chat.continuation.end_of_turn) == 3


def test_a_template_that_raises_is_the_requests_fault() -> None:
    source = default_chat().model.template.source + "{% if shout %}{{ raise_exception('no') }}{% endif %}"
    continuation = Continuation(Renderer(ChatTemplate(source), default_chat().model.tokenizer))
    with pytest.raises(TemplateError, match="no"):
        continuation.first([USER], (), {"shout": True})


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "bot"}], "messages[1].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "mood": "y"}], "messages[0].mood"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio"),
        ([{"role": "tool", "tool_call_id": 4}], "messages[0].tool_call_id"),
    ],
)
def test_messages_that_make_no_sense_are_refused_by_their_path(raw: list[Any], where: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_messages(raw)
    assert caught.value.param == where
    assert where in str(caught.value)


def test_messages_come_to_one_normal_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]
    nulls = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "annotations": []}
    assert read_messages([nulls]) == [{"role": "assistant", "content": ""}]
    call = {"index": 0, "function": {"name": "f", "arguments": {"a": 1}}}
    (message,) = read_messages([{"role": "assistant", "reasoning": "hm", "tool_calls": [call]}])
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
