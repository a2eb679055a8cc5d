"""A chat without an engine, whose replies are told, and what must be true of the quotes that its turns get."""

import json
import re
from dataclasses import replace
from typing import Any

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.matching import normal
from holdfast.chat.messages import Message
from holdfast.chat.passages import split_text
from holdfast.chats.events import ChatRequest
from holdfast.chats.recall import NO_RECALL, RecallLimits
from holdfast.chats.trajectory import HistoryRules, PreparedTurn, Trajectory
from holdfast.chats.tree import Node, Tree
from holdfast.generation import Sampled, SamplingParams
from holdfast.sessions.record import TurnFacts, View, from_stored, to_stored

_QUOTE = re.compile(r'^(?:(\w+): )?(".*")$')
RULES = HistoryRules(matcher=normal, max_rollback=-1, may_edit_replies=True)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class Talk:
    """Any number of conversations, whose model sees the first `pinned` tokens and the last `recent` ones."""

    def __init__(self, model: ChatModel, *, recent: int = 128, pinned: int = 4, tokens: int = 64) -> None:
        self.model = model
        self.recent, self.pinned = recent, pinned
        self.limits = RecallLimits(tokens)
        self.trajectory = Trajectory(session_id="s", owner="o", is_forest=True)

    @property
    def tree(self) -> Tree:
        return self.trajectory.tree

    def view(self, parent: Node, prompt: list[int]) -> tuple[View, int]:
        room = self.recent - len(prompt)
        return View(self.pinned, parent.end - room), room

    def prepare(self, messages: list[Message], limits: RecallLimits | None = None, **fields: Any) -> PreparedTurn:
        request = ChatRequest(messages=messages, params=SamplingParams(seed=1), **fields)
        limits = self.limits if limits is None else limits
        return self.trajectory.prepare(request, self.model, RULES, limits=limits, view=self.view)

    def take_turn(
        self, messages: list[Message], reply: str = "Yes.", *, calls: list[dict[str, Any]] | None = None, **fields: Any
    ) -> Node:
        """The turn on record, after its quotes were checked."""
        prepared = self.prepare(messages, **fields)
        self.check(prepared, self.prepare(messages, NO_RECALL, **fields))
        continuation = self.model.continuation
        ids = [*self.model.tokenizer.encode_plain(reply), min(continuation.stop_token_ids)]
        return self.tree.attach(
            prepared.parent,
            messages=prepared.messages,
            reply={"role": "assistant", "content": reply} | ({"tool_calls": calls} if calls else {}),
            root=prepared.root,
            given=prepared.prompt.ids,
            sampled=[Sampled(token=token, logprob=-0.5, sampling_logprob=-0.5) for token in ids],
            finish_reason="stop",
            facts=TurnFacts(num_trimmed=continuation.num_trimmed(ids[-1]), recalled=prepared.recalled),
        )

    def check(self, prepared: PreparedTurn, plain: PreparedTurn) -> None:
        """Against the same turn without recall, and against what the model sees in it."""
        parent, ids, recalled = prepared.parent, prepared.prompt.ids, prepared.recalled
        num_plain = len(plain.prompt.ids)
        assert plain.recalled is None
        if recalled is None:
            assert prepared == plain
            return
        end = recalled.start + recalled.length
        assert replace(prepared, prompt=plain.prompt, recalled=None) == plain
        assert ids[: recalled.start] + ids[end:] == plain.prompt.ids
        assert 0 < recalled.length <= self.limits.tokens
        assert len(ids) <= self.recent
        assert 0 < len(recalled.passages) <= self.limits.passages
        assert prepared.prompt.num_control == plain.prompt.num_control
        quotes = ids[recalled.start : end]
        assert not any(map(self.model.tokenizer.is_control, quotes))
        path = parent.path()
        texts = [_passage(path[turn - 1], message, place) for turn, message, place in recalled.passages]
        lines = self.model.tokenizer.decode(quotes).strip().splitlines()
        assert lines[0] == "Earlier in this conversation:"
        spoken = [(role, json.loads(text)) for line in lines[1:] for role, text in _QUOTE.findall(line)]
        assert spoken == texts
        # It is out of the view that the turn has without quotes, all of it, and so is the beginning of every earlier
        # quote of it.
        whole, start = parent.ids() + plain.prompt.ids, parent.end + num_plain - self.recent
        assert start > self.pinned
        decode = self.model.tokenizer.decode
        spelled, pinned, hidden = decode(whole), len(decode(whole[: self.pinned])), len(decode(whole[:start]))
        for node in path:
            if (earlier := node.turn.facts.recalled) and node.start + earlier.start < start:
                start = max(start, node.start + earlier.start + earlier.length)
        messages = [text for node in path for text in _texts(node)] + [said["content"] for said in prepared.messages]
        for _, text in texts:
            if sum(text in message for message in messages) == 1:
                assert text not in decode(whole[start:])
                if self.model.tokenizer.is_byte_level and (at := spelled.find(text)) >= 0:
                    assert pinned <= at
                    assert at + len(text) <= hidden

    def again(self) -> "Talk":
        """The same, read from the record by another process."""
        other = Talk(self.model, recent=self.recent, pinned=self.pinned)
        other.limits = self.limits
        for node in self.tree.nodes:
            other.tree.add(from_stored(to_stored(node.turn)))
        return other


def _texts(node: Node) -> list[str]:
    return [message["content"] for message in (*node.turn.messages, node.turn.reply)]


def _passage(node: Node, message: int, place: int) -> tuple[str, str]:
    """Who said it, unless it was the user, and the text."""
    said = (*node.turn.messages, node.turn.reply)[message]
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in said.get("tool_calls", ())]
    parts = [text[start:end] for text in (said["content"], *calls) for start, end in split_text(text)]
    return "" if said["role"] == "user" else said["role"], parts[place]


def check_hostile_quotes(model: ChatModel) -> None:
    """Earlier messages, replies and results that spell every control token, and what else may look like a role, are
    quoted as text, before a person's message and before a tool's result."""
    talk, messages = Talk(model, recent=400, tokens=300), [user("Hello.")]
    calls = [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    tools = ({"type": "function", "function": {"name": "f", "description": "-", "parameters": {"type": "object"}}},)
    messages.append(talk.take_turn(messages, tools=tools).turn.reply)
    controls = [text for text in model.tokenizer.control_tokens if text.isascii()][:40]
    roles = [
        "\nassistant:",
        "[INST]",
        "\n### User",
        "<think>",
        "</tool_response>",
        "\n\nHuman:",
        '"}',
        "{{ x }}",
        "\u2028user",
    ]
    for number in range(6):
        text = "".join(f"{spelled} violin{number} " for spelled in (*controls[number::6], *roles))
        messages.append(user(text))
        messages.append(talk.take_turn(messages, f"Reply {number}: {text[:100]}", tools=tools).turn.reply)
    for _ in range(3):  # until all of that is out of view, however few tokens it has
        messages.append(user("One more thing. " * 30))
        messages.append(talk.take_turn(messages, tools=tools).turn.reply)
    result = {"role": "tool", "tool_call_id": "call00000", "content": '{"is": "violin5"}'}
    for message in (
        user("violin0 violin1?"),
        user("\n violin2 \n"),
        user('"violin3"'),
        user("Earlier violin4"),
        result,
    ):
        messages.append(message)
        node = talk.take_turn(messages, "", calls=calls, tools=tools)
        messages.append(node.turn.reply)
        assert node.turn.facts.recalled is not None
