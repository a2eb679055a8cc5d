"""All chat sessions of a server: create, take turns, fork, reward, close. What every chat door calls."""

import contextlib
import hashlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.codec import restored
from holdfast.chats.control import Control
from holdfast.chats.events import TurnEvent, TurnRequest
from holdfast.chats.history_sync import rollback
from holdfast.chats.samples.assembly import assemble
from holdfast.chats.samples.options import Options, SessionFacts
from holdfast.chats.samples.raw_tokens import from_spans
from holdfast.chats.samples.sample import Export
from holdfast.chats.trajectory import Trajectory
from holdfast.chats.transfer import chat_content, checked_trajectory
from holdfast.chats.tree import Node
from holdfast.chats.turn import ChatTurns
from holdfast.errors import InvalidArgument, Paused
from holdfast.sessions.journal.base import Journal, StoredSession
from holdfast.sessions.journal.entries import Rewarded, TurnDelivered
from holdfast.sessions.portable.chat_port import ChatContent
from holdfast.sessions.portable.content import PortableTurn
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.view import SessionView


class ChatService:
    """Trajectories by session id. A trajectory lives as long as its session does."""

    def __init__(self, runtime: Runtime, chat: ChatModel, turns: ChatTurns, control: Control) -> None:
        self.control = control
        self._runtime = runtime
        self._chat = chat
        self._turns = turns
        self._trajectories: dict[str, Trajectory] = {}
        runtime.on_gone = self._forget
        runtime.chats = self
        self.template_hash = hashlib.blake2b(chat.template.source.encode(), digest_size=16).hexdigest()

    def restore(self, stored: StoredSession) -> None:
        """A chat session from the journal; the runtime has its tokens already."""
        self._trajectories[stored.opened.session_id] = restored(stored)

    def _forget(self, session_id: str) -> None:
        if trajectory := self._trajectories.pop(session_id, None):
            for node in trajectory.tree.nodes:  # or a cycle would keep all of it until the next collection
                node.children.clear()
            trajectory.tree.root.children.clear()

    async def create(
        self,
        owner: str,
        *,
        group: str = "",
        label: str = "",
        metadata: Mapping[str, str] | None = None,
        pin_tokens: int | None = None,
    ) -> SessionView:
        view = await self._runtime.create(
            owner,
            label=label,
            group=group,
            kind="chat",
            metadata=metadata,
            pin_tokens=pin_tokens,
            eos_token_ids=sorted(self._chat.continuation.stop_token_ids),
        )
        self._trajectories[view.session_id] = Trajectory(
            session_id=view.session_id, owner=owner, group=group, pin_tokens=pin_tokens, created_at=view.created_at
        )
        return view

    def get(self, session_id: str, owner: str) -> tuple[SessionView, Trajectory]:
        """How a chat session stands."""
        view = self._runtime.info(session_id, owner)
        try:
            return view, self._trajectories[session_id]
        except KeyError:
            raise InvalidArgument(
                f"session {session_id} was opened for raw tokens over gRPC; open one with POST /sessions to chat"
            ) from None

    @property
    def journal(self) -> Journal:
        return self._runtime.journal

    def view(self, session_id: str, owner: str) -> SessionView:
        """How any session stands, also one of raw tokens."""
        return self._runtime.info(session_id, owner)

    def list_views(self, owner: str, *, after: int = 0) -> list[SessionView]:
        return self._runtime.list_sessions(owner, after=after)

    async def close(self, session_id: str, owner: str) -> None:
        await self._runtime.close(session_id, owner)

    async def turn(self, session_id: str, owner: str, asked: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """One turn. Close it early and nothing of it is recorded, unless someone else listens too."""
        _, trajectory = self.get(session_id, owner)
        turn = self._turns.turn(trajectory, asked)
        try:
            async for event in turn:
                yield event
        finally:
            await turn.aclose()

    async def fork(self, session_id: str, owner: str, *, label: str = "") -> SessionView:
        """A new session with the same past; the two go their own ways from here."""
        _, source = self.get(session_id, owner)
        source.claim()
        try:
            if source.needs_rewind:
                await rollback(self._runtime, source)
            numbers = [node.number for node in source.tree.tip.path()]
            view, _ = await self._runtime.fork(session_id, owner, label=label, kind="chat", forked_turns=numbers)
            fork = Trajectory(
                session_id=view.session_id,
                owner=owner,
                group=source.group,
                pin_tokens=source.pin_tokens,
                created_at=view.created_at,
            )
            fork.tree, tip = source.tree.copy(source.tree.tip)
            fork.synced_node = tip.ancestor(source.tree.common(source.tree.tip, source.synced_node).depth)
            self._trajectories[view.session_id] = fork
        finally:
            source.release()
        return view

    @contextlib.asynccontextmanager
    async def exported(self, session_id: str, owner: str) -> AsyncIterator[ChatContent]:
        """All that is on record of a chat, which takes no turn while the context lasts. SessionBusy where one runs."""
        _, trajectory = self.get(session_id, owner)
        trajectory.claim()
        try:
            yield await chat_content(trajectory, self._runtime.journal)
        finally:
            trajectory.release()

    def prepared(self, stored: StoredSession, turns: Sequence[PortableTurn]) -> Callable[[], None]:
        """Checks a chat from elsewhere; blocks. What it gives, called on the loop, takes the chat over."""
        trajectory = checked_trajectory(stored, turns, keeps_bodies=not self._runtime.journal.keeps_bodies)

        def take_over() -> None:
            self._trajectories[trajectory.session_id] = trajectory

        return take_over

    async def reward(self, session_id: str, owner: str, reward: float, *, turn: int | None = None) -> None:
        """What a session, or one of its turns, was worth."""
        _, trajectory = self.get(session_id, owner)
        if not math.isfinite(reward):
            raise InvalidArgument("reward must be a finite number", param="reward")
        if turn is not None and not 1 <= turn <= len(trajectory.tree.nodes):
            raise InvalidArgument(f"turn must be 1 to {len(trajectory.tree.nodes)}, got {turn}", param="turn")
        await self._runtime.journal.write(Rewarded(session_id, turn, reward))
        if turn is None:
            trajectory.reward = reward
        else:
            trajectory.tree.nodes[turn - 1].reward = reward

    def samples(self, session_id: str, owner: str, options: Options) -> Callable[[], Export]:
        """What a trainer reads of a session: its turns so far, or the spans of one of raw tokens.

        Looks at the session now; the work itself is to be called in a thread, as turns on record do not change. It
        reads the journal there: heavy payloads are nowhere else.
        """
        view = self._runtime.info(session_id, owner)
        trajectory = self._trajectories.get(session_id)
        summary = {"history_length": view.history_length, "dropped_tokens": view.dropped_token_count}
        facts = SessionFacts(
            session_id=session_id,
            group=trajectory.group if trajectory else "",
            label=view.label,
            metadata=view.metadata,
            reward=trajectory.reward if trajectory else None,
            summary=summary,
        )

        def detokenize(ids: list[int]) -> str:
            return self._chat.tokenizer.decode(ids)

        if trajectory is None:
            pieces = self._runtime.history(session_id, owner)
            return partial(from_spans, pieces, options, facts, detokenize=detokenize)
        journal = self._runtime.journal

        def response(node: Node) -> bytes:
            kept = node.record.response if node.record else None
            return kept if kept is not None else journal.response(session_id, node.number)

        return partial(assemble, trajectory.tree, options, facts, detokenize=detokenize, response_of=response)

    def confirm(self, session_id: str, number: int) -> None:
        """The reply of a turn has reached its client, as far as a server can know."""
        if trajectory := self._trajectories.get(session_id):
            trajectory.tree.nodes[number - 1].is_delivered = True
            self._runtime.journal.note(TurnDelivered(session_id, number))

    def pause(self, *, abort: bool) -> int:
        """Let no new turn begin; with `abort`, end those that run. How many were running."""
        self.control.pause()
        flying = [t.in_flight for t in self._trajectories.values() if t.in_flight is not None]
        if abort:
            for turn in flying:
                turn.shared.abort(Paused("turns were paused and this one was ended; try again later"))
        return len(flying)
