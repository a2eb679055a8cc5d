"""One chat turn, from the claim on its session to its commit. The session is free again on every way out.

A turn of a strict session has it for itself. Turns of a forest share the claim on its session and run side by side:
each has the tip of its conversation, and on our engine a cache, for itself.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.continuation import Fits, Opening
from holdfast.chat.messages import Message
from holdfast.chat.reply import ReplyEnd, ReplyPiece
from holdfast.chats.caches import Cache, CachePool
from holdfast.chats.events import TurnEvent, TurnRequest, TurnResponse, TurnStarted
from holdfast.chats.grammar_queue import GrammarQueue
from holdfast.chats.live import LiveTurn
from holdfast.chats.recall import NO_RECALL, RecallLimits
from holdfast.chats.retry import Broadcast
from holdfast.chats.trajectory import HistoryRules, PreparedTurn, Tip, Trajectory
from holdfast.chats.tree import Node
from holdfast.chats.view import bounded_view
from holdfast.errors import ContextTooLong, HoldfastError, SessionBusy, SessionFailed, SessionNotFound
from holdfast.generation import Sampled, StopReason
from holdfast.sessions.admission import Admission
from holdfast.sessions.history import GivenTokens
from holdfast.sessions.journal.base import TurnRecorded
from holdfast.sessions.operations import Claim
from holdfast.sessions.ports import ModelInfo
from holdfast.sessions.record import TurnFacts, TurnRecord, View
from holdfast.sessions.runtime import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 64  # requests of one forest that may wait until a turn at the same tip is over
_LARGE_BYTES = 1 << 16
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="text")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """A reply that is ready to be recorded. `body` is what the client gets, `response` what is recorded of it."""

    message: Message
    tokens: tuple[Sampled, ...]
    finish_reason: str
    facts: TurnFacts
    request: bytes
    response: bytes
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: ReplyEnd | None = None  # where the reply was streamed
    is_adopted: bool = False  # an upstream sampled it: its tokens are not yet in the session's history


# Makes the reply of a turn: pieces as they come, then what is to be recorded, or a response that is not recorded.
TurnSource = Callable[["ChatTurn"], AsyncGenerator[ReplyPiece | TurnResponse | TurnResult, None]]


@dataclass(slots=True, kw_only=True)
class ChatSetup:
    """What all turns of a server share. Mutable: a trainer changes `weight_version`."""

    runtime: Runtime
    chat: ChatModel
    source: TurnSource
    rules: HistoryRules
    admission: Admission
    weight_version: str = ""
    grammars: GrammarQueue = field(init=False)
    forest_rules: HistoryRules = field(init=False)
    is_forest: bool = False  # what a new session is, unless its client says
    max_conversations: int = 8  # caches that one forest may have
    recall: RecallLimits = NO_RECALL  # of sessions that do not say
    context_budget: int = 0  # tokens of a prompt for an upstream; 0: any number
    stream_stall_s: float = 0.0  # how long a turn waits for its readers, in all; 0: no limit
    expert_shape: Callable[[], tuple[int, int] | None] = lambda: None  # layers and experts per token, if known
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set)

    def __post_init__(self) -> None:
        self.grammars = GrammarQueue(self.chat.grammars)
        self.forest_rules = replace(self.rules, max_rollback=-1, may_edit_replies=True)

    def in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task that goes on though its caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class ChatTurn:
    """Claims its session when it is made, or joins the turns that have; `start` it at once. Listen to `events`."""

    def __init__(self, setup: ChatSetup, trajectory: Trajectory, request: TurnRequest) -> None:
        self.id = secrets.token_hex(8)
        self.setup = setup
        self.trajectory = trajectory
        self.request = request
        if trajectory.claim is not None:
            setup.runtime.check_open()
            self.claim: Claim = trajectory.claim
        else:
            self.claim = setup.runtime.claim(trajectory.session_id, trajectory.owner, turn_id=self.id)
            trajectory.claim = self.claim if trajectory.is_forest else None
        self.prepared: PreparedTurn
        self._tip: Tip | None = None  # of a forest, that nobody else may use
        self._cache: Cache | None = None
        self._node: Node | None = None  # once it is on record
        self.events = Broadcast[TurnEvent](setup.stream_stall_s)
        self.live = LiveTurn(setup.runtime.watch, trajectory.session_id, self.id)
        self._committing: asyncio.Task[TurnRecord] | None = None
        self._has_begun = False
        self._queued_at = self._admitted_at = time.perf_counter()

    def start(self) -> None:
        self.trajectory.turns.append(self)
        self.events.start(self._run(), self._ended)

    async def _run(self) -> None:
        self._has_begun = True
        try:
            await self._take_turn()
        finally:
            await asyncio.shield(self.setup.in_background(self._settle()))

    def _ended(self) -> None:
        if not self._has_begun and self._is_last():  # cancelled before its first step: nobody else frees the session
            self.claim.release_now()

    async def _take_turn(self) -> None:
        """Match and render the request, wait to be admitted, make the reply, commit."""
        setup = self.setup
        self.claim.check_not_closed()  # it may have been closed since it was claimed
        self.claim.check_room()
        self.prepared = prepared = await self._prepare()
        below = prepared.parent.number if prepared.is_branch else None
        self.events.publish(
            TurnStarted(
                turn_id=self.id,
                writer=self.request.writer,
                num_dropped=self.num_dropped,
                branched_below=below,
                num_recalled=prepared.num_recalled,
            )
        )
        owner = self.trajectory.owner
        self._queued_at = time.perf_counter()
        async with setup.admission.admitted(owner=owner), contextlib.aclosing(setup.source(self)) as events:
            self._admitted_at = time.perf_counter()
            async for event in events:
                if not isinstance(event, TurnResult):
                    self.events.publish(event)
                    await self.events.caught_up()
                    continue
                number = await self._committed(event)
                if event.ending is not None:
                    self.events.publish(event.ending)
                self.events.publish(
                    TurnResponse(body=event.body, number=number, status=event.status, headers=event.headers)
                )

    def elapsed_s(self) -> float:
        """Seconds since the turn was admitted."""
        return time.perf_counter() - self._admitted_at

    def effort(self, **known: float | None) -> dict[str, float]:
        """What the reply took until now: what is `known` of it, the wait in the queue, and the time since then."""
        times = {"queue_s": self._admitted_at - self._queued_at, "total_s": self.elapsed_s()}
        return {
            name: value if isinstance(value, int) else round(value, 6)
            for name, value in (known | times).items()
            if value is not None
        }

    @property
    def sent_view(self) -> View | None:
        """What an upstream gets of the path, where that is not all of it."""
        view = self.prepared.view
        return view if self.setup.context_budget and view and view.num_hidden else None

    def num_dropped(self) -> int:
        """How many tokens of the conversation are out of view by now."""
        if self.setup.context_budget:
            return self.sent_view.num_hidden if self.sent_view else 0
        session, recent = self.claim.session, self.setup.runtime.model.recent
        if not self.trajectory.is_forest:
            return session.num_dropped(recent)
        prepared, node = self.prepared, self._node
        end = node.end if node else prepared.parent.end + len(prepared.prompt.ids)
        return max(0, end - _pinned(node or prepared.parent, session.sink) - recent)

    async def _prepare(self) -> PreparedTurn:
        """Match and render the request. In a forest this waits until no other turn is at the same tip."""
        setup, request, trajectory = self.setup, self.request.request, self.trajectory
        fits: Fits = partial(
            check_fits, model=setup.runtime.model, may_truncate=request.may_truncate, at_least="at least "
        )
        if setup.context_budget:
            fits = partial(check_budget, budget=setup.context_budget, at_least="at least ")
        rules = setup.forest_rules if trajectory.is_forest else setup.rules
        limits = request.recall or trajectory.recall or setup.recall
        view = partial(self._sent, limits=limits) if setup.context_budget else self._view
        prepare = partial(trajectory.prepare, request, setup.chat, rules, fits, limits=limits, view=view)
        # Beside the request it may be the whole past that is taken into the index.
        num_bytes = request.num_bytes + (trajectory.num_unindexed if limits.tokens else 0)
        while True:
            # A large request is rendered in a thread. What is on record does not change meanwhile, and a strict session
            # gains no turn.
            prepared = await run_off_loop(prepare, num_bytes)
            if not trajectory.is_forest:
                return prepared
            if (busy := trajectory.busy_tips.get(prepared.tip)) is None:
                self._tip = prepared.tip
                trajectory.busy_tips[self._tip] = asyncio.Event()
                return prepared
            if trajectory.num_waiting >= MAX_WAITING:
                raise SessionBusy(
                    f"session {trajectory.session_id}: {MAX_WAITING} requests wait for turns of their conversations"
                )
            trajectory.num_waiting += 1
            try:
                await busy.wait()
            finally:
                trajectory.num_waiting -= 1
            self.claim.check_not_closed()

    def _view(self, parent: Node, prompt: list[int]) -> tuple[View, int]:
        """What the last of the new tokens below `parent` attends to, and the room for quotes."""
        pinned = _pinned(parent, self.claim.session.sink) if self.trajectory.is_forest else self.claim.session.sink
        room = self.setup.runtime.model.recent - len(prompt)  # the whole prompt stays in view
        return View(pinned, parent.end - room), room

    def _sent(self, parent: Node, prompt: list[int], limits: RecallLimits) -> tuple[View, int]:
        """What an upstream gets of the path to `parent`, and the room for quotes."""
        budget = self.setup.context_budget
        view = bounded_view(
            parent,
            prompt,
            budget=budget,
            opening=partial(self._opening, parent),
            pin_tokens=self.trajectory.pin_tokens,
            reserve=min(limits.tokens, budget // 4),
        )
        return view, budget - (parent.end - view.num_hidden + len(prompt))

    def _opening(self, parent: Node) -> Opening:
        first = parent.ancestor(1).turn
        tools, variables = msgspec.json.decode(first.root.tools), msgspec.json.decode(first.root.variables)
        return self.setup.chat.continuation.opening(first.messages, tools, variables, at=first.facts.started_at)

    def given_since(self, base: Node) -> tuple[list[int], GivenTokens]:
        """The tokens that a cache at the end of `base` lacks for the reply, and what is known of them."""
        prepared = self.prepared
        nodes = prepared.parent.path()[base.depth :]
        tokens = [token for node in nodes for token in node.tokens()] + prepared.prompt.ids
        return tokens, GivenTokens([node.turn for node in nodes], prepared.recalled)

    async def cache(self) -> tuple[Cache, Claim]:
        """The cache in which the turn is computed, and the claim on it."""
        trajectory, setup = self.trajectory, self.setup
        if not trajectory.is_forest:
            return trajectory.cache, self.claim
        if trajectory.caches is None:
            num = max(1, min(setup.max_conversations, setup.runtime.capacity))
            trajectory.caches = CachePool(setup.runtime, trajectory.owner, trajectory.tree.root, num)
        self._cache = cache = await trajectory.caches.take(self.claim, self.prepared.parent)
        assert cache.claim is not None
        return cache, cache.claim

    async def _committed(self, result: TurnResult) -> int | None:
        """The number of the turn on record. Recording is brought to its end even if the client has left.

        A session that was closed meanwhile records nothing; what an upstream sampled still goes to its client.
        """
        self._committing = asyncio.ensure_future(self._commit(result))
        try:
            return (await asyncio.shield(self._committing)).number
        except SessionNotFound:
            if not result.is_adopted:
                raise
            return None

    async def _commit(self, result: TurnResult) -> TurnRecord:
        if result.is_adopted:
            self.live.begin(self.prepared)
            self.live.sampled(result.tokens)
            self.setup.runtime.watch.adopted(len(result.tokens))
        await self._sync_history(result)
        async with self.trajectory.commit_lock:  # turns of a forest are numbered one after the other
            return await self._record(result)

    async def _record(self, result: TurnResult) -> TurnRecord:
        trajectory, prepared, claim = self.trajectory, self.prepared, self.claim
        turn = trajectory.tree.new_turn(
            prepared.parent,
            messages=prepared.messages,
            reply=result.message,
            root=prepared.root,
            given=prepared.prompt.ids,
            sampled=result.tokens,
            finish_reason=result.finish_reason,
            facts=self._facts(result.facts, result.tokens),
            num_control=prepared.prompt.num_control,
            request=result.request,
            response=result.response,
            idempotency_key=self.request.key.key,
            body_hash=self.request.key.body_hash,
        )
        await claim.record(TurnRecorded(trajectory.session_id, turn))
        claim.check_not_closed()  # closing beats recording
        if self.setup.runtime.journal.keeps_bodies:
            turn.request = turn.response = None
        is_kept = bool(result.facts.cut) or result.body == result.response  # the client's copy follows from the record
        response = TurnResponse(body=b"" if is_kept else result.body, number=turn.number, headers=result.headers)
        before = trajectory.tree.tip
        self._node = node = trajectory.add(turn, response)
        claim.session.num_turns, claim.session.last_turn = node.depth, node.number
        self.live.recorded(node)
        if not trajectory.is_forest:
            trajectory.cache.advance(node)
            return turn
        if self._cache is not None:
            self._cache.advance(node)
        base = trajectory.tree.common(before, node)
        turns = [part.turn for part in node.path()[base.depth :]]
        await claim.replace_history(base.end, turns, sink=_pinned(node, claim.session.sink))
        return turn

    def _num_trimmed(self, tokens: Sequence[Sampled]) -> int:
        """How many of the sampled tokens the next turn does not go on from."""
        return self.setup.chat.continuation.num_trimmed(tokens[-1].token) if tokens else 0

    def _facts(self, facts: TurnFacts, tokens: Sequence[Sampled]) -> TurnFacts:
        """With what is known of the request: the ids that it came with, where it stands."""
        request, prepared = self.request, self.prepared
        if num_trimmed := self._num_trimmed(tokens):
            facts = replace(facts, num_trimmed=num_trimmed)
        if prepared.recalled is not None:
            facts = replace(facts, recalled=prepared.recalled)
        if self.sent_view is not None:
            facts = replace(facts, view=self.sent_view)
        if request.response_id or request.agent or prepared.is_edited:
            agent, is_edited = dict(request.agent), prepared.is_edited
            facts = replace(facts, response_id=request.response_id, agent=agent, is_edited=is_edited)
        if self._cache is not None and self._cache.claim is not None and prepared.parent.parent is None:
            facts = replace(facts, pinned=self._cache.claim.session.sink)
        return facts

    async def _sync_history(self, result: TurnResult) -> None:
        """Bring the session's history to the end of the turn: adopt an upstream's tokens, or rewind what our engine
        sampled beyond a stop string, or what the next turn does not go on from."""
        trajectory, prepared, claim = self.trajectory, self.prepared, self.claim
        lasting = result.tokens[: len(result.tokens) - self._num_trimmed(result.tokens)]
        end = prepared.parent.end + len(prepared.prompt.ids) + len(lasting)
        if trajectory.is_forest:
            if self._cache is None:  # an upstream needs none
                return
            assert self._cache.claim is not None
            claim = self._cache.claim
        if result.is_adopted:
            base, _ = await trajectory.cache.sync_to(claim, prepared.parent)
            trajectory.cache.needs_rewind = True
            reason = StopReason.MAX_TOKENS if result.finish_reason == "length" else StopReason.EOS
            given, known = self.given_since(base)
            await claim.adopt(given, lasting, reason, known)
        elif claim.history_length > end:
            await claim.rewind(end)
        claim.check_not_closed()
        if claim.history_length != end:
            logger.error("session %s changed during a turn, which was not recorded", trajectory.session_id)
            raise SessionFailed(f"session {trajectory.session_id} changed during a turn; the turn was not recorded")

    async def _settle(self) -> None:
        """End what was begun, roll back what was not committed, then free the session."""
        trajectory = self.trajectory
        try:
            if self._committing is not None:
                await asyncio.gather(self._committing, return_exceptions=True)
            if not trajectory.is_forest:
                await trajectory.cache.rollback(self.claim)
            elif self._cache is not None:
                assert trajectory.caches is not None
                await trajectory.caches.give_back(self._cache)
        except SessionNotFound:
            pass  # closed meanwhile: there is nothing left to roll back
        except HoldfastError as exc:
            if self.claim.session.dropped is None:
                logger.warning(
                    "session %s: a cancelled turn is still to be rolled back: %s", trajectory.session_id, exc
                )
        finally:
            if self._is_last():
                await self.claim.release()

    def _is_last(self) -> bool:
        """Leave the turns in flight. Whether the claim on the session is to be released."""
        trajectory = self.trajectory
        trajectory.turns.remove(self)
        self.live.end()
        if self._tip is not None:
            trajectory.busy_tips.pop(self._tip).set()
        if trajectory.turns:
            return False
        trajectory.claim = None
        return True


def _pinned(node: Node, default: int) -> int:
    """How many tokens at the start of the conversation of `node` never leave the window."""
    pinned = node.ancestor(1).turn.facts.pinned
    return default if pinned is None else pinned


def kept_request(request: Mapping[str, Any], num_known: int) -> bytes:
    """A request as it is recorded: without the ids and the first messages, which the path already holds."""
    kept = {key: value for key, value in request.items() if key not in ("input_ids", "kv_transfer_params")}
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = messages[num_known:]
    return msgspec.json.encode(kept)


def check_fits(
    num_new: int, model: ModelInfo, *, may_truncate: bool, field: str = "messages", at_least: str = ""
) -> None:
    """Raises where new tokens exceed the window, unless the caller has agreed that they are cut."""
    limit = model.sink + model.recent
    if num_new > limit and not may_truncate:
        raise ContextTooLong(
            f"{field}: {at_least}{num_new} new tokens exceed the window of {limit}; "
            'send fewer, set "truncation": "auto", or serve with a larger --recent',
            param=field,
        )


def check_budget(num_new: int, budget: int, *, at_least: str = "") -> None:
    """Raises where new tokens are more than an upstream may get."""
    if num_new > budget:
        raise ContextTooLong(
            f"messages: {at_least}{num_new} new tokens exceed the server's --context-budget of {budget}; send fewer",
            param="messages",
        )


async def run_off_loop(work: Callable[[], T], num_bytes: int) -> T:
    """The result of `work` on a request of that size. Large work runs in a thread, so that the event loop stays
    responsive; for small work a thread would cost more than it saves. The threads are few, as such work takes memory,
    and have no other work, as it takes long."""
    if num_bytes < _LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
