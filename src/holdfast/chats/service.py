"""All chat sessions of a server: create, take turns, fork, reward, export, close."""

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from holdfast.chat.messages import read_messages
from holdfast.chat.template import RESERVED
from holdfast.chats.events import TurnEvent, TurnRequest, TurnResponse
from holdfast.chats.recall import RecallLimits
from holdfast.chats.samples.assembly import Options, SessionFacts, assemble, from_spans
from holdfast.chats.samples.mismatch import mismatches
from holdfast.chats.samples.sample import Export
from holdfast.chats.tokens import TokenPage, checked_range, path_page, span_page
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node
from holdfast.chats.turn import ChatSetup, ChatTurn
from holdfast.chats.view import WHOLE
from holdfast.errors import HoldfastError, InvalidArgument, JournalFailed, Paused, SessionFileRefused
from holdfast.sessions.journal.base import Rewarded, StoredSession, TurnDelivered, with_bodies
from holdfast.sessions.limits import check_metadata
from holdfast.sessions.record import TemplateInputs, View, without
from holdfast.sessions.session import NAME
from holdfast.sessions.transfers import ChatContent
from holdfast.sessions.view import SessionView
from holdfast.sessions.watch import SessionEvent

_MAX_DEPTH = 256  # of JSON in an imported session


class Trajectories:
    """The trajectories of all chat sessions, by session id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Trajectory] = {}
        self._names: dict[tuple[str, str], str] = {}  # owner and name -> session id

    def add(self, trajectory: Trajectory) -> None:
        self._by_id[trajectory.session_id] = trajectory
        if trajectory.name:
            self._names.setdefault((trajectory.owner, trajectory.name), trajectory.session_id)

    def named(self, owner: str, name: str) -> str | None:
        """The id of the owner's session of that name."""
        return self._names.get((owner, name))

    def get(self, session_id: str) -> Trajectory | None:
        return self._by_id.get(session_id)

    def loaded(self, stored: StoredSession) -> Callable[[], None]:
        """Build the trajectory of a session that was read, in a thread; what it returns adds it, on the loop."""
        if stored.opened.kind == "tokens":
            return lambda: None
        return partial(self.add, Trajectory.of_stored(stored))

    def forget(self, session_id: str) -> None:
        """Drop the trajectory of a session that left the memory. Its nodes form cycles: unlinked, they are freed at
        once.

        A turn in flight still reads the tree; it finds out by itself that the session was closed.
        """
        trajectory = self._by_id.pop(session_id, None)
        if trajectory is None:
            return
        if self.named(trajectory.owner, trajectory.name) == session_id:
            del self._names[trajectory.owner, trajectory.name]
        if not trajectory.turns:
            for node in (trajectory.tree.root, *trajectory.tree.nodes):
                node.children.clear()

    def in_flight(self) -> list[ChatTurn]:
        return [turn for trajectory in self._by_id.values() for turn in trajectory.turns]


class ChatService:
    """Chat sessions on a runtime whose `on_loaded` and `on_removed` are `loaded` and `forget` of `trajectories`."""

    def __init__(self, setup: ChatSetup, trajectories: Trajectories) -> None:
        self.setup = setup
        self._runtime = setup.runtime
        self._trajectories = trajectories
        self._naming: dict[tuple[str, str], asyncio.Task[str]] = {}
        self.template_hash = hashlib.blake2b(setup.chat.template.source.encode(), digest_size=16).hexdigest()

    async def create(
        self,
        owner: str,
        *,
        group: str = "",
        label: str = "",
        metadata: Mapping[str, str] | None = None,
        pin_tokens: int | None = None,
        is_forest: bool | None = None,
        name: str | None = None,
        recall: RecallLimits | None = None,
    ) -> SessionView:
        """A new chat session. `is_forest`: it may hold many conversations; None: as the server's settings say. With a
        `name` it fails where another session has that; None: the one that its metadata gives it, if that is free."""
        metadata = {**(metadata or {}), **(recall.as_metadata() if recall else {})}
        check_metadata("metadata", metadata)
        recall = RecallLimits.of_metadata(metadata)
        if name is None:
            name = await self._runtime.free_name(owner, metadata)
        is_forest = self.setup.is_forest if is_forest is None else is_forest
        view = await self._runtime.create(
            owner,
            label=label,
            group=group,
            kind="forest" if is_forest else "chat",
            name=name,
            metadata=metadata,
            pin_tokens=pin_tokens,
            eos_token_ids=sorted(self.setup.chat.continuation.stop_token_ids),
        )
        self._trajectories.add(
            Trajectory(
                session_id=view.session_id,
                owner=owner,
                is_forest=is_forest,
                name=name,
                pin_tokens=pin_tokens,
                recall=recall,
            )
        )
        return view

    async def named(self, owner: str, name: str) -> str:
        """The id of the owner's session of that name; a forest that is created when it is asked for first."""
        key = (owner, name)
        if (found := self._trajectories.named(owner, name)) is not None:
            return found
        if key not in self._naming:  # of several who ask at once, one looks it up or creates it
            self._naming[key] = asyncio.ensure_future(self._found_or_created(owner, name))
            self._naming[key].add_done_callback(lambda _: self._naming.pop(key))
        return await asyncio.shield(self._naming[key])

    async def _found_or_created(self, owner: str, name: str) -> str:
        find = partial(self._runtime.journal.find_named, owner, name)
        if (found := await find()) is not None:
            return found
        try:
            view = await self.create(owner, label=name, metadata={NAME: name}, is_forest=True, name=name)
        except JournalFailed:
            if (found := await find()) is not None:  # another member was faster
                return found
            raise
        return view.session_id

    def get(self, session_id: str, owner: str) -> Trajectory:
        """The trajectory of the owner's chat session."""
        self._runtime.find(session_id, owner)
        trajectory = self._trajectories.get(session_id)
        if trajectory is None:
            raise InvalidArgument(
                f"session {session_id} is a session of raw tokens over gRPC; open a chat session with POST /sessions"
            )
        return trajectory

    def turn(self, session_id: str, owner: str, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The events of one turn. A retry joins the turn in flight, or gets the last response again.

        If the generator is closed early, nothing of the turn is recorded, unless someone else listens too.
        """
        trajectory = self.get(session_id, owner)
        for turn in trajectory.turns:
            if turn.events.is_running and request.key.repeats(turn.request.key):
                return turn.events.listen()
        if (trajectory.is_forest or not trajectory.turns) and (node := trajectory.repeated(request.key)):
            return self._replay(trajectory, node)
        turn = ChatTurn(self.setup, trajectory, request)
        turn.start()
        return turn.events.listen()

    async def _replay(self, trajectory: Trajectory, node: Node) -> AsyncGenerator[TurnEvent, None]:
        turn, last = node.turn, trajectory.last_responses.get(node.number)
        if last is not None and last.body:
            body = last.body
        else:
            turn = await with_bodies(turn, trajectory.session_id, self._runtime.journal)
            body = without(turn.response or b"", turn.facts.cut)
        yield TurnResponse(body=body, number=turn.number, headers=last.headers if last else {})

    async def fork(self, session_id: str, owner: str, *, label: str = "", turn: int | None = None) -> SessionView:
        """A new session with the same past, up to the end of that turn, by default of the latest; the two go their own
        ways from here."""
        source = self.get(session_id, owner)
        tip = None if turn is None else source.node(turn)
        async with self._runtime.claim(session_id, owner) as claim:
            await source.cache.rollback(claim)
            is_copy = tip in (None, source.tree.tip)
            tip = tip or source.tree.tip
            turns = [node.turn for node in tip.path()]
            view = await self._runtime.fork_chat(claim, turns, label=label, is_copy=is_copy)
            fork = Trajectory(
                session_id=view.session_id,
                owner=owner,
                is_forest=source.is_forest,
                pin_tokens=source.pin_tokens,
                recall=source.recall,
                tree=source.tree.copy(tip),
            )
            fork.cache.node = fork.tree.tip
            if is_copy:
                fork.cache.node = fork.tree.tip.ancestor(source.tree.common(tip, source.cache.node).depth)
            self._trajectories.add(fork)
        return view

    async def content(self, session_id: str, owner: str) -> ChatContent:
        """All that is on record of a chat that the caller has claimed."""
        trajectory = self.get(session_id, owner)
        journal, nodes = self._runtime.journal, trajectory.tree.nodes
        turns = [await with_bodies(node.turn, session_id, journal) for node in nodes]
        for index, turn in enumerate(turns):  # a file counts spelled control tokens for the chat, not for each turn
            turn.num_control = 0 if index else sum(node.turn.num_control for node in nodes)
        return ChatContent(tuple(turns), self._runtime.find(session_id, owner).reward)

    def prepare_import(self, stored: StoredSession) -> Callable[[], None]:
        """Checks a chat from elsewhere, or raises SessionFileRefused. Blocks, changes nothing.

        What it returns, called on the event loop, takes the chat over.
        """
        try:
            trajectory = Trajectory.of_stored(stored)
            for node in trajectory.tree.nodes:
                _check_imported(node)
            for root in {node.turn.root for node in trajectory.tree.nodes}:
                self._check_root(root)
        except (HoldfastError, msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as exc:
            raise SessionFileRefused(f"invalid session file: {exc}", reason="damaged") from exc

        def take_over() -> None:
            if self._runtime.journal.keeps_bodies:
                for node in trajectory.tree.nodes:
                    node.turn.request = node.turn.response = None
            self._trajectories.add(trajectory)

        return take_over

    def _check_root(self, root: TemplateInputs) -> None:
        """Raises ValueError or HoldfastError where tools or variables cannot be rendered."""
        tools, variables = msgspec.json.decode(root.tools), msgspec.json.decode(root.variables)
        if not isinstance(tools, list) or not isinstance(variables, dict):
            raise ValueError("tools must be a JSON list, and template variables a JSON object")
        if reserved := RESERVED.intersection(variables):
            raise ValueError(f"{min(reserved)} is not a variable that a chat may set")
        _check_depth([tools, variables], "the template's input")
        try:
            self.setup.chat.continuation.root(tools, variables)
        except TypeError as exc:
            raise ValueError(f"tools or template variables cannot be rendered: {exc}") from exc

    async def reward(self, session_id: str, owner: str, reward: float, *, turn: int | None = None) -> None:
        """Set the reward of a session, or of one of its turns."""
        trajectory = self.get(session_id, owner)
        if not math.isfinite(reward):
            raise InvalidArgument("reward must be a finite number", param="reward")
        node = None if turn is None else trajectory.node(turn)
        await self._runtime.record(session_id, owner, Rewarded(session_id, turn, reward))
        session = self._runtime.find(session_id, owner)
        if node is None:
            session.reward = reward
        else:
            node.turn.reward = reward
        self._runtime.watch.changed(session)

    def samples(self, session_id: str, owner: str, options: Options) -> Callable[[], Export]:
        """The samples of a session: of its turns so far, or of the spans of a token session.

        Looks at the session now. What it returns is to be called in a thread: recorded turns do not change, and heavy
        payloads are read from the journal there.
        """
        view = self._runtime.info(session_id, owner)
        trajectory = self._trajectories.get(session_id)
        facts = SessionFacts(
            session_id=session_id,
            group=view.group if trajectory else "",
            label=view.label,
            metadata=view.metadata,
            reward=view.reward,
            is_forest=trajectory.is_forest if trajectory else False,
            summary={"history_length": view.history_length, "dropped_tokens": view.dropped_token_count},
            expert_shape=self.setup.expert_shape(),
        )
        chat = self.setup.chat
        detokenize = chat.tokenizer.decode
        if trajectory is None:
            pieces = self._runtime.history(session_id, owner)
            return partial(from_spans, pieces, options, facts, detokenize=detokenize)
        tree, tip = trajectory.tree, trajectory.tree.tip
        sent = tip.turn.facts.view

        response_of = self._responses(session_id)

        def export() -> Export:
            told = {
                "accumulated_token_ids": tip.ids_as_sampled(),
                "max_trim_tokens": chat.continuation.max_trim_tokens,
                "tito_session_mismatch": mismatches(tip, chat),
            }
            if sent is not None:
                told["dropped_tokens"] = sent.num_hidden
            whole = replace(facts, summary={**facts.summary, **told})
            return assemble(tree, options, whole, detokenize=detokenize, response_of=response_of)

        return export

    def tokens(
        self, session_id: str, owner: str, *, turn: int | None, start: int, limit: int
    ) -> Callable[[], TokenPage]:
        """A page of the tokens of the path to a turn, by default the latest, or of a token session.

        Looks at the session now. What it returns is to be called in a thread: it may read replies from the journal.
        """
        view, trajectory = self._runtime.info(session_id, owner), self._trajectories.get(session_id)
        if trajectory is None:
            if turn is not None:
                raise InvalidArgument("a session of raw tokens has no turns; leave out turn", param="turn")
            total = view.history_length
            page = checked_range(start, limit, total)
            pieces = self._runtime.history(session_id, owner, page.start, page.stop)
            return partial(span_page, pieces, page, total, View(view.sink, total - view.recent))
        tip = trajectory.tree.tip if turn is None else trajectory.node(turn)
        seen = tip.turn.facts.view if self.setup.context_budget else None
        if seen is None:
            pinned = tip.ancestor(1).turn.facts.pinned
            seen = View(view.sink if pinned is None else pinned, tip.end - view.recent)

        page = checked_range(start, limit, tip.end)
        return partial(path_page, tip, page, seen, self._responses(session_id), self.setup.chat.tokenizer)

    def _responses(self, session_id: str) -> Callable[[Node], bytes]:
        """Reads the reply to a turn, in any thread."""
        journal = self._runtime.journal

        def response_of(node: Node) -> bytes:
            kept = node.turn.response
            return kept if kept is not None else journal.response(session_id, node.number)

        return response_of

    def in_flight(self, session_id: str) -> list[SessionEvent]:
        """What was told of the turns that a chat has in flight, for those who begin to listen now."""
        trajectory = self._trajectories.get(session_id)
        return [event for turn in (trajectory.turns if trajectory else ()) for event in turn.live.so_far()]

    def confirm(self, session_id: str, number: int) -> None:
        """The response of a turn has reached its client, as far as a server can know."""
        if trajectory := self._trajectories.get(session_id):
            trajectory.tree.nodes[number - 1].turn.is_delivered = True
            self._runtime.journal.note(TurnDelivered(session_id, number))

    def pause(self, *, abort: bool) -> int:
        """Let no new turn begin; with `abort`, end those that run. Returns how many were running."""
        self.setup.admission.pause()
        turns = self._trajectories.in_flight()
        if abort:
            for turn in turns:
                turn.events.abort(Paused("generation was paused and this turn was aborted; try again later"))
        return len(turns)


def _check_imported(node: Node) -> None:
    """Raises if a turn from a file is not valid: nothing else checks it before it is used."""
    turn = node.turn
    messages = [*turn.messages, turn.reply]
    if read_messages(messages) != messages or turn.reply["role"] != "assistant":
        raise ValueError(f"the messages of turn {turn.number} are not as a server records them")
    response = turn.response or b""
    request, reply = (_json_object(body, f"turn {turn.number}") for body in (turn.request or b"", response))
    if not isinstance(request.get("messages", []), list):
        raise ValueError(f"the messages in the request of turn {turn.number} are not a list")
    for part in (request, reply, turn.facts.sampling):
        _check_depth(part, f"turn {turn.number}")
    spans = [num for _, num in turn.facts.weight_spans]
    if spans and (min(spans) < 1 or sum(spans) != len(turn.sampled)):
        raise ValueError(f"the weight_spans of turn {turn.number} do not cover its sampled tokens")
    view, recalled = turn.facts.view or WHOLE, turn.facts.recalled
    if not view.pinned <= view.start <= node.start + len(turn.given):
        raise ValueError(f"the view of turn {turn.number} is not one of its prompt")
    if recalled is not None and recalled.start + recalled.length > len(turn.given):
        raise ValueError(f"turn {turn.number} recalls more tokens than it was given")
    for ranges in ([turn.facts.routed_experts], [turn.facts.indexer_topk], turn.facts.cut):
        at = 0
        for start, end in (part for part in ranges if isinstance(part, tuple)):
            if not at <= start < end <= len(response):
                raise ValueError(f"turn {turn.number} names byte ranges that its response does not have")
            at = end


def _json_object(body: bytes, where: str) -> dict[str, Any]:
    value = msgspec.json.decode(body)
    if not isinstance(value, dict):
        raise ValueError(f"a request or response of {where} is not a JSON object")
    return value


def _check_depth(value: Any, where: str) -> None:
    """Raises ValueError for JSON that is nested more deeply than all who read it can follow."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            return
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"{where} has JSON that is nested more than {_MAX_DEPTH} levels deep")
