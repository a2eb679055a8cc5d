"""History and tail together are the whole render, for the real templates of the families that teams train."""

import json
import random
from typing import Any

import pytest

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.messages import Message
from tests.effort import THOROUGH
from tests.families import FAMILIES, Family, family_model

NUM_CONVERSATIONS = 500 if THOROUGH else 15

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


@pytest.mark.parametrize("name", FAMILIES)
def test_history_and_tail_are_the_whole_render(name: str) -> None:
    num_trimmed = sum(Talk(name, seed).run() for seed in range(NUM_CONVERSATIONS))
    assert (num_trimmed > 0) == (family_model(name).continuation.max_trim_tokens > 0)
