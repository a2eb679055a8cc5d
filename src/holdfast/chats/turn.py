"""One chat turn: claim, prepare, make the reply, commit. The slot is free again on every way out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from holdfast.backends.json_members import without
from holdfast.chat.chat_model import ChatModel
from holdfast.chats.broadcast import Broadcast
from holdfast.chats.codec import turn_recorded
from holdfast.chats.control import Control
from holdfast.chats.events import TurnEvent, TurnRequest, TurnResponse, TurnStarted
from holdfast.chats.history_sync import rollback
from holdfast.chats.record_json import response_of
from holdfast.chats.trajectory import HistoryRules, PreparedTurn, Trajectory
from holdfast.chats.tree import Node, Record
from holdfast.chats.turn_source import TurnResult, TurnSource
from holdfast.errors import HoldfastError, SessionFailed, SessionNotFound
from holdfast.off_loop import run_off_loop
from holdfast.sessions.admission import Admission
from holdfast.sessions.runtime import Runtime

logger = logging.getLogger(__name__)


class ChatTurns:
    def __init__(
        self,
        runtime: Runtime,
        chat: ChatModel,
        making: TurnSource,
        *,
        rules: HistoryRules,
        admission: Admission,
        control: Control,
    ) -> None:
        self._runtime = runtime
        self._chat = chat
        self._making = making
        self._rules = rules
        self._admission = admission
        self._control = control
        self._settling: set[asyncio.Task[None]] = set()

    async def turn(self, trajectory: Trajectory, asked: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events. A request that we know joins the turn in flight, or gets the last one again."""
        flying = trajectory.in_flight
        if flying is not None and flying.shared.is_running and asked.ticket.repeats(flying.ticket):
            shared = flying.shared
        elif flying is None and asked.ticket.repeats(trajectory.last_ticket):
            yield await self._again(trajectory)
            return
        else:
            shared = Broadcast[TurnEvent]()
            shared.events = self._run(trajectory, asked, shared)
        async with contextlib.aclosing(shared.listen()) as events:
            async for event in events:
                yield event

    async def _again(self, trajectory: Trajectory) -> TurnResponse:
        node = trajectory.tree.nodes[trajectory.last_number - 1]
        last = trajectory.last_reply
        if last is not None and last.body:
            body = last.body
        else:
            body = without(await response_of(node, trajectory.session_id, self._runtime.journal), node.facts.cut)
        return TurnResponse(body=body, number=node.number, headers=last.headers if last else {}, is_replay=True)

    async def _run(
        self, trajectory: Trajectory, asked: TurnRequest, shared: Broadcast[TurnEvent]
    ) -> AsyncGenerator[TurnEvent, None]:
        flying = trajectory.claim(asked.ticket, shared)
        try:
            with self._runtime.held(trajectory.session_id, trajectory.owner):
                prepared = await self._prepared(trajectory, asked)
                below = prepared.parent.number if prepared.is_branch else None
                yield TurnStarted(turn_id=flying.turn_id, writer=asked.writer, branched_below=below)
                async with (
                    self._admitted(),
                    contextlib.aclosing(self._made(trajectory, prepared, asked)) as made,
                ):
                    async for event in made:
                        yield event
        finally:
            await self._settle(trajectory)

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """A place, at a moment when turns may begin; whoever waits for that gives the place back."""
        while True:
            await self._control.passed()
            async with self._admission.admitted():
                if not self._control.is_paused:
                    yield
                    return

    async def _prepared(self, trajectory: Trajectory, asked: TurnRequest) -> PreparedTurn:
        """Large requests are rendered in a thread; the slot is ours, so nothing changes meanwhile."""
        request = asked.request
        return await run_off_loop(lambda: trajectory.prepare(request, self._chat, self._rules), request.num_bytes)

    async def _made(
        self, trajectory: Trajectory, prepared: PreparedTurn, asked: TurnRequest
    ) -> AsyncGenerator[TurnEvent, None]:
        making = self._making.events(trajectory, prepared, asked)
        async with contextlib.aclosing(making):
            async for event in making:
                if not isinstance(event, TurnResult):
                    yield event
                    continue
                number = await self._committed(trajectory, prepared, asked, event)
                if event.ending is not None:
                    yield event.ending
                yield TurnResponse(body=event.body, number=number, status=event.status, headers=event.headers)

    async def _committed(
        self, trajectory: Trajectory, prepared: PreparedTurn, asked: TurnRequest, made: TurnResult
    ) -> int | None:
        """The number of the turn on record. Once begun, recording is brought to its end, whoever still waits.

        A session that was closed meanwhile keeps no turn; what an upstream sampled still goes to its client.
        """
        task = asyncio.ensure_future(self._commit(trajectory, prepared, asked, made))
        trajectory.committing = task
        try:
            return (await asyncio.shield(task)).number
        except SessionNotFound:
            if made.ending is not None:
                raise
            return None

    async def _commit(
        self, trajectory: Trajectory, prepared: PreparedTurn, asked: TurnRequest, made: TurnResult
    ) -> Node:
        session_id, tree = trajectory.session_id, trajectory.tree
        if tree.tip is not prepared.tip:
            raise self._moved(session_id)
        await self._making.sync_history(trajectory, prepared, made)
        end = prepared.parent.end + len(prepared.prompt.ids) + len(made.tokens)
        if self._runtime.info(session_id, trajectory.owner).history_length != end:
            raise self._moved(session_id)
        made_record = Record(
            request=made.request,
            response=made.response,
            request_timestamp=made.facts.started_at,
            timestamp=made.facts.ended_at,
        )
        node = tree.new_node(
            prepared.parent,
            messages=prepared.messages,
            reply=made.message,
            root=prepared.root,
            given=prepared.prompt.ids,
            sampled=made.tokens,
            finish_reason=made.finish_reason,
            facts=made.facts,
            record=made_record,
        )
        journal = self._runtime.journal
        await journal.write(turn_recorded(session_id, node, asked.ticket, prepared.prompt.num_control))
        self._runtime.info(session_id, trajectory.owner)  # closing beats recording
        if journal.keeps_bodies:
            node.record = replace(made_record, request=None, response=None)
        tree.add(node)
        trajectory.synced_node, trajectory.needs_rewind = node, False
        trajectory.num_branches += prepared.is_branch
        trajectory.num_control += prepared.prompt.num_control
        trajectory.last_ticket, trajectory.last_number = asked.ticket, node.number
        is_kept = bool(made.facts.cut) or made.body == made.response  # the client's copy can be had from the record
        trajectory.last_reply = TurnResponse(
            body=b"" if is_kept else made.body, number=node.number, headers=made.headers
        )
        return node

    def _moved(self, session_id: str) -> SessionFailed:
        logger.error("session %s moved under a turn; nothing of it was recorded", session_id)
        return SessionFailed(f"session {session_id} moved while a turn was running; the turn was not recorded")

    async def _settle(self, trajectory: Trajectory) -> None:
        """End what was begun, take back what was not committed, then free the slot, whoever still waits for it."""

        async def settle() -> None:
            try:
                if trajectory.committing is not None:
                    await asyncio.gather(trajectory.committing, return_exceptions=True)
                if trajectory.needs_rewind:
                    await rollback(self._runtime, trajectory)
            except SessionNotFound:
                pass  # closed meanwhile: there is nothing left to take back
            except HoldfastError as exc:
                logger.warning("session %s: a cancelled turn is still to be taken back: %s", trajectory.session_id, exc)
            finally:
                trajectory.release()

        task = asyncio.ensure_future(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        await asyncio.shield(task)
