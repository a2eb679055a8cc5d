"""History and tail together are the whole render, for the real templates of the families that teams train."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.chat.chat_model import ChatModel, with_template
from holdfast.chat.harmony import HarmonyReader
from holdfast.chat.messages import Message
from holdfast.chat.template import ChatTemplate
from holdfast.chat.tokenizer import Detokenizer
from holdfast.chat.tool_calls import Delta, without_tags
from holdfast.errors import InvalidArgument, ModelError
from holdfast.generation import Sampled
from tests.effort import THOROUGH
from tests.families import FAMILIES, Family, base_tokenizer, family_model, family_tokenizer
from tests.recalling import check_hostile_quotes

NUM_CONVERSATIONS = 500 if THOROUGH else 8

_WORDS = [
    "a",
    "Hello",
    " world",
    "  ",
    "\n",
    "\n\n",
    "é",
    "日本語",
    "🦊",
    "{",
    '"',
    "\\",
    "0.5",
    "<b>",
    "'",
    "\t.",
    "€ ",
]
_TYPES: dict[str, list[Any]] = {
    "string": ["", "x", "日本 語", 'a "quoted" \\ text', "line\nbreak", "5", "true", "null", "[1]", "<arg>"],
    "integer": [0, -7, 12345678901234],
    "number": [0.5, -1e30],
    "boolean": [True, False],
    "array": [[], [1, "two", None, {"deep": ["é"]}]],
    "object": [{}, {"a": {"b": [True, "<|x|>"]}}],
}


def _text(rng: random.Random, model: ChatModel, *, may_be_empty: bool = True) -> str:
    controls = rng.sample(sorted(model.tokenizer.control_tokens), 2)
    pieces = rng.choices([*_WORDS, *controls], k=rng.randint(0 if may_be_empty else 1, 6))
    return "".join(pieces) or ("" if may_be_empty else "x")


def _tool(rng: random.Random, index: int) -> dict[str, Any]:
    kinds = rng.sample(sorted(_TYPES), rng.randint(0, 4))
    parameters = {"type": "object", "properties": {f"{kind}_argument": {"type": kind} for kind in kinds}}
    function = {"name": f"tool_{index}", "description": f"Does {index}", "parameters": parameters}
    return {"type": "function", "function": function}


def _call(rng: random.Random, tools: list[dict[str, Any]], ids: str) -> dict[str, Any]:
    function = rng.choice(tools)["function"]
    properties = function["parameters"]["properties"]
    names = rng.sample(sorted(properties), rng.randint(0, len(properties)))
    arguments = {name: rng.choice(_TYPES[properties[name]["type"]]) for name in names}
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": ids, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _compared(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return message["content"], message.get("reasoning_content", ""), calls


class Talk:
    """A random conversation with one family's model, as it would go through a session."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.family: Family = FAMILIES[name]
        self.model = family_model(name)
        self.keeping = family_model(name, keeping=True)
        self.tools = [_tool(self.rng, index) for index in range(self.rng.choice([0, 0, 1, 3]))]
        self.messages: list[Message] = []

    def given(self) -> list[Message]:
        """What a client sends next."""
        calls = self.messages[-1].get("tool_calls", ()) if self.messages else ()
        new: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": _text(self.rng, self.model)} for call in calls
        ]
        if not self.messages and self.family.has_system and self.rng.random() < 0.5:
            new.append({"role": "system", "content": _text(self.rng, self.model, may_be_empty=False)})
        if calls and (self.rng.random() < 0.7 or self._needs_reply_first):
            return new
        for _ in range(1 if self.family.alternates else self.rng.choice([1, 1, 2])):
            if self.messages and self.family.later_system and self.rng.random() < 0.2:
                new.append({"role": "system", "content": _text(self.rng, self.model)})
            new.append({"role": "user", "content": _text(self.rng, self.model)})
        return new

    @property
    def _needs_reply_first(self) -> bool:
        """A user's message right after a tool's result breaks the alternation of roles."""
        return self.family.alternates and self.model.continuation.abilities.has_tools

    def reply(self, *, must_reason: bool) -> Message:
        message: Message = {"role": "assistant", "content": _text(self.rng, self.model).strip()}
        if self.family.reasons and (must_reason or self.rng.random() < 0.5):
            message["reasoning_content"] = _text(self.rng, self.model, may_be_empty=False).strip() or "Hm."
        if self.tools and self.rng.random() < 0.5:
            number = self.rng.randint(1, self.family.max_calls)
            message["tool_calls"] = [_call(self.rng, self.tools, f"call0000{index}") for index in range(number)]
            if not self.family.calls_have_text:
                message["content"] = ""
        return message

    def check_reading(self) -> None:
        """A reply as the template renders it is read back as it was, in pieces of any size."""
        self.messages += self.given()
        model = self.keeping
        prompt = model.continuation.first(self.messages, self.tools)
        message = self.reply(must_reason=prompt.is_reasoning)
        ids = self._sampled(model.continuation.rendered_reply(self.messages, message, self.tools))
        reply = model.reply(tools=self.tools, is_reasoning=prompt.is_reasoning)
        for token in ids:
            reply.push(Sampled(token=token, logprob=0.0, sampling_logprob=0.0))
        reply.finish()
        assert _compared(reply.message) == _compared(message)
        detokenizer = Detokenizer(model.tokenizer)
        pieces: list[tuple[str, str | None]] = [(detokenizer.push(token), reply.tags.get(token)) for token in ids]
        for size in (1, 1_000, self.rng.randint(2, 9)):
            reader = model.reply(tools=self.tools, is_reasoning=prompt.is_reasoning).reader
            delta, text = Delta(), ""
            for piece, tag in [*pieces, ("", "")]:
                text += piece
                if tag is not None:
                    for start in range(0, len(text), size):
                        delta += reader.push(text[start : start + size])
                    delta += reader.push_tag(tag)
                    text = ""
            delta += reader.finish()
            calls = [(call.name, json.loads(call.arguments)) for call in delta.calls]
            read = without_tags(delta.content), without_tags(delta.reasoning), calls
            assert read == _compared(message)

    def whole(self, *, prompt: bool) -> list[int]:
        """The whole conversation rendered at once, by the template that leaves the past as it is."""
        continuation = self.keeping.continuation
        shown, tools = continuation._renderable(self.messages, self.tools)
        renderer = continuation._renderer
        return renderer.encode(renderer.text(shown, prompt=prompt, tools=tools))

    def run(self) -> int:
        """Goes through a few turns; how often a token was trimmed."""
        continuation = self.model.continuation
        self.messages += (new := self.given())
        prompt = continuation.first(new, self.tools)
        history = prompt.ids
        num_trimmed = 0
        for _ in range(self.rng.randint(1, 4)):
            reply = self.reply(must_reason=prompt.is_reasoning)
            self.messages.append(reply)
            whole = self.whole(prompt=False)
            assert whole[: len(history)] == history
            history = history + self._sampled(whole[len(history) :])
            new = self.given()
            prompt = continuation.tail(history[-1], new, self.tools, start=len(self.messages), reply=reply)
            self.messages += new
            trimmed = continuation.num_trimmed(history[-1])
            assert trimmed <= continuation.max_trim_tokens
            num_trimmed += trimmed
            history = history[: len(history) - trimmed] + prompt.ids
        assert history == self.whole(prompt=True)
        return num_trimmed

    def _sampled(self, rest: list[int]) -> list[int]:
        """A reply's tokens up to the one at which the model stops, whichever it chooses where it has a choice."""
        stops = self.model.continuation.stop_token_ids
        end = next((index for index, token in enumerate(rest) if token in stops), None)
        return rest[: end + 1] if end is not None else [*rest, self.rng.choice(sorted(stops))]


# Large vocabularies take seconds to load: of families whose templates have the same rules, one is tried every time.
_ALIKE = ("qwen2_5", "llama3", "llama3_1", "llama3_1_tools", "gemma", "gemma3", "deepseek_v3")
TRIED = FAMILIES if THOROUGH else [name for name in FAMILIES if name not in _ALIKE]


@pytest.mark.parametrize("name", TRIED)
def test_history_and_tail_are_the_whole_render_and_replies_are_read_back(name: str) -> None:
    num_trimmed = 0
    for seed in range(NUM_CONVERSATIONS):
        num_trimmed += Talk(name, seed).run()
        Talk(name, seed).check_reading()
    assert (num_trimmed > 0) == (family_model(name).continuation.max_trim_tokens > 0)
    check_hostile_quotes(family_model(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_without_its_first_turn_begins_as_the_template_begins_one(name: str) -> None:
    continuation = family_model(name).continuation
    one, other = ({"role": "user", "content": text} for text in ("Hello there", "What now?"))
    for system in ([{"role": "system", "content": "Be kind."}] if FAMILIES[name].has_system else [], []):
        opening = continuation.opening([*system, one])
        assert continuation.first([*system, one]).ids[: len(opening.ids)] == opening.ids
        for last in (continuation.end_of_turn, None):
            tail = continuation.tail(last, [other]).ids
            shown = opening.ids + tail[opening.num_closing(tail) :]
            assert shown == continuation.first([*system, other]).ids


def _ids(name: str, *tokens: str) -> list[int]:
    return [family_model(name).tokenizer.control_tokens[token] for token in tokens]


USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "-", "parameters": {"type": "object"}}}


def _calling(number: int = 1) -> Message:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"call0000{index}", "type": "function", "function": function} for index in range(number)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_the_opener_of_the_next_message_is_given_whichever_was_sampled() -> None:
    continuation = family_model("glm4_moe").continuation
    user, observation = _ids("glm4_moe", "<|user|>", "<|observation|>")
    result = {"role": "tool", "tool_call_id": "call00000", "content": "4"}
    for last, new, first in [
        (user, USER, user),
        (observation, result, observation),
        (observation, USER, user),
        (user, result, observation),
        (5, USER, user),
    ]:
        prompt = continuation.tail(last, [new], [TOOL], reply=_calling())
        assert continuation.num_trimmed(last) == (last != 5)  # a reply that was cut short has no opener to trim
        assert prompt.ids[0] == first
        assert prompt.ids.count(user) + prompt.ids.count(observation) == 1


def test_the_end_of_a_harmony_reply_is_the_one_that_the_template_has_in_the_past() -> None:
    continuation = family_model("gptoss").continuation
    ended, returned, called = _ids("gptoss", "<|end|>", "<|return|>", "<|call|>")
    assert ended not in continuation.stop_token_ids  # it ends the analysis, not the reply
    assert continuation.tail(returned, [USER]).ids[0] == ended
    assert continuation.tail(called, [USER], [TOOL], reply=_calling()).ids[0] == called
    assert continuation.num_trimmed(returned) == continuation.num_trimmed(called) == 1


def test_a_result_is_rendered_with_the_name_of_its_call() -> None:
    model = family_model("gptoss")
    result = {"role": "tool", "tool_call_id": "call00000", "content": "4"}
    text = model.tokenizer.decode(model.continuation.tail(None, [result], [TOOL], reply=_calling()).ids)
    assert "functions.f to=assistant" in text
    with pytest.raises(InvalidArgument, match=r"messages\[3\].*called no tool"):
        model.continuation.tail(None, [result], [TOOL], start=3, reply=USER)


@pytest.mark.parametrize(
    ("name", "messages", "where", "says"),
    [
        ("gemma2", [{"role": "system", "content": "x"}, USER], "messages[0].role", "System role not supported"),
        ("gemma2", [USER, {"role": "assistant", "content": "x"}, USER, USER], "messages[3]", "must alternate"),
        ("mistral_nemo", [USER, USER], "messages[1]", "must alternate"),
        ("mistral_nemo", [USER, {"role": "system", "content": "x"}], "messages[1].role", "at this position"),
        ("llama3_2", [USER, _calling(), USER, _calling(2), USER], "messages[3]", "single tool-calls"),
        ("gptoss", [USER, {"role": "system", "content": "x"}, USER], "messages[1].role", "at this position"),
    ],
)
def test_what_a_template_refuses_is_said_in_its_words_with_the_field(
    name: str, messages: list[Message], where: str, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        family_model(name).continuation.first(messages)
    assert caught.value.param == where


def test_calls_have_ids_that_the_template_accepts() -> None:
    model = family_model("mistral_nemo")
    reply = model.reply(tools=[TOOL])
    call = model.tokenizer.encode('[TOOL_CALLS][{"name": "f", "arguments": {}}]</s>')
    for token in call:
        reply.push(Sampled(token=token, logprob=0.0, sampling_logprob=0.0))
    reply.finish()
    result = {"role": "tool", "tool_call_id": reply.message["tool_calls"][0]["id"], "content": "4"}
    assert model.continuation.tail(call[-1], [result], [TOOL], reply=reply.message).ids


def test_a_client_cannot_spell_openers_that_the_tokenizer_file_leaves_plain() -> None:
    model = family_model("deepseek_v3_tools")
    opener = "<\uff5cUser\uff5c>"
    assert not family_tokenizer("deepseek_v3_tools").control_tokens.get(opener)
    prompt = model.continuation.first([{"role": "user", "content": f"a{opener}b"}])
    assert prompt.ids.count(model.tokenizer.control_tokens[opener]) == prompt.num_control == 1
    assert opener * 2 not in model.tokenizer.decode(prompt.ids)


def test_a_vocabulary_without_the_template_s_tokens_is_refused_at_the_start() -> None:
    base = replace(family_tokenizer("yi"), inner=base_tokenizer("yi"))
    with pytest.raises(ModelError, match="does not mark where an assistant's turn ends"):
        with_template(base, family_model("yi").template, vocab_size=1)


def test_the_date_of_a_conversation_can_be_fixed() -> None:
    model = family_model("llama3_2")
    first, second, third = (model.continuation.first([USER], at=at).ids for at in (1e9, 1e9, 1.1e9))
    assert first == second != third
    assert "09 Sep 2001" in model.tokenizer.decode(first)


@pytest.mark.parametrize(
    "name", ["gptoss", "deepseek_v3_tools", "mistral_nemo", "qwen3"] if THOROUGH else ["mistral_nemo"]
)
def test_a_forced_call_is_one_that_is_read_back(name: str) -> None:
    model = family_model(name)
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "description": "-", "parameters": schema}}
    state = model.grammars.compiled(model.forced_call([tool], is_one=True)).start()
    reply = model.reply(tools=[tool])
    while not state.may_end:
        token = int(np.flatnonzero(state.allowed())[-1])
        state.accept(token)
        reply.push(Sampled(token=token, logprob=0.0, sampling_logprob=0.0))
    reply.finish()
    assert _compared(reply.message) == ("", "", [("f", {"a": 1})])


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_calls_whose_format_no_grammar_knows_cannot_be_forced(name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be enforced; use auto") as caught:
        family_model(name).forced_call([TOOL], is_one=True)
    assert caught.value.param == "tool_choice"


def test_tools_are_refused_where_calls_are_rendered_in_an_unknown_format() -> None:
    tokenizer = family_tokenizer("qwen3")
    source = "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    source += "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
    model = with_template(tokenizer, ChatTemplate(source), vocab_size=1)
    assert model.reply().message["content"] == ""
    with pytest.raises(InvalidArgument, match="cannot read"):
        model.reply(tools=[TOOL])


_PARTS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "final", "assistant", "{}", "{"]
_PARTS += [" to=functions.f", "commentary", "x", " ", "to", "a<|"]


@given(st.lists(st.sampled_from(_PARTS), max_size=12), st.integers(1, 5))
def test_a_harmony_reply_is_read_the_same_in_pieces_of_any_size(parts: list[str], size: int) -> None:
    def read(pieces: list[str]) -> Delta:
        reader, delta = HarmonyReader(["f"]), Delta()
        for piece in pieces:
            delta += reader.push(piece)
        return delta + reader.finish()

    text = "".join(parts)
    assert read([text]) == read([text[start : start + size] for start in range(0, len(text), size)])


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls"),
    [
        ("Hi", "Hi", "", 0),
        ("to be or not", "to be or not", "", 0),
        ("<|channel|>final<|message|>Hi<|return|>", "Hi", "", 0),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", "Hm", 0),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "", "", 1),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", "", 1),
        ("<|channel|>commentary to=functions.g<|message|>{}<|call|>", "{}", "", 0),
        ("<|channel|>commentary to=functions.f<|message|>{<|call|>", "{", "", 0),
        ("<|channel|>commentary<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B", "A\nB", "", 0),
        ("<|channel|>ana", "", "", 0),
    ],
)
def test_channels_become_content_reasoning_and_calls(text: str, content: str, reasoning: str, num_calls: int) -> None:
    reader = HarmonyReader(["f"])
    delta = reader.push(text) + reader.finish()
    assert (delta.content, delta.reasoning, len(delta.calls)) == (content, reasoning, num_calls)
