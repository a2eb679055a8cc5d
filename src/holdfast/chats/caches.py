"""The KV caches of a chat session: token sessions in the backend, each at the end of some turn of the tree.

A strict session has one, which is the session itself. A forest has one for each conversation that was used lately, as
far as there are slabs: what is lost of them is computed again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.chats.tree import Node, Tree
from holdfast.errors import CapacityExhausted, HistoryConflict, HoldfastError, SessionFailed, SessionNotFound
from holdfast.sessions.operations import Claim
from holdfast.sessions.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Cache:
    """Mutable; touched only by whoever has claimed its session."""

    session_id: str
    node: Node  # the turn at whose end the backend's history is
    needs_rewind: bool = False  # the backend holds more than that: a cancelled turn was not rolled back yet
    claim: Claim | None = None  # of the turn that uses it

    async def sync_to(self, claim: Claim, node: Node, *, is_limited: bool = True) -> tuple[Node, int]:
        """Rewind the backend to the deepest turn that it shares with the path to `node`: that turn, and how many tokens
        had to be computed again. `is_limited`: raises where these would be many."""
        length = claim.history_length
        if length != self.node.end and not self.needs_rewind:
            raise HistoryConflict(expected=self.node.end, actual=length)
        base = Tree.common(self.node, node)
        recomputed = 0
        if length > base.end:
            before = self.node, self.needs_rewind
            self.node, self.needs_rewind = base, True  # which is true at every moment of the rewind
            try:
                is_limited = is_limited and not before[1]
                recomputed = (await claim.rewind(base.end, is_limited=is_limited)).recomputed_tokens
            except HoldfastError:
                if claim.history_length == length:
                    self.node, self.needs_rewind = before
                raise
        self.advance(base)
        return base, recomputed

    async def rollback(self, claim: Claim) -> None:
        """Rewind what a turn that was not committed has left in the backend."""
        if self.needs_rewind:
            await claim.settled()
            if claim.history_length > self.node.end:
                await claim.rewind(self.node.end, is_limited=False)
            self.needs_rewind = False

    def advance(self, node: Node) -> None:
        """The backend's history is at the end of `node` now."""
        self.node, self.needs_rewind = node, False


class CachePool:
    """The caches of one forest, on one event loop."""

    def __init__(self, runtime: Runtime, owner: str, root: Node, max_caches: int) -> None:
        self._runtime = runtime
        self._owner = owner
        self._root = root
        self._max_caches = max_caches
        self._num_opening = 0
        self._caches: list[Cache] = []  # the one used least recently comes first
        self._returned = asyncio.Event()

    async def take(self, forest: Claim, node: Node) -> Cache:
        """A cache for a turn below `node`, claimed for the caller, who gives it back. Waits where all that the forest
        may have are in use.

        A cache that is on the path to `node` goes on. Otherwise a new one is opened: from a snapshot that an earlier
        process left, or as a copy where one shares a part of the path; but a forest whose caches rest gives up one of
        these before it takes a slab from others.
        """
        while True:
            forest.check_not_closed()
            idle = [cache for cache in self._caches if cache.claim is None]
            nearest, shared = self._nearest(idle, node)
            saved = self._saved(forest.session.id, node, shared)
            has_room = len(self._caches) + self._num_opening < self._max_caches
            if saved is not None and (has_room or idle):
                if not has_room:
                    await self._drop(idle[0])
                return await self._open(forest, None, saved)
            if nearest is not None and nearest.node is shared:
                chosen: Cache | None = nearest
            elif has_room and (not idle or self._runtime.has_free_slab):
                return await self._open(forest, nearest if shared is not self._root else None)
            else:
                chosen = nearest if shared is not self._root else next(iter(idle), None)
            if chosen is None:
                self._returned.clear()
                await self._returned.wait()
            elif self._claimed(chosen):
                return chosen

    def _nearest(self, idle: Sequence[Cache], node: Node) -> tuple[Cache | None, Node]:
        """The cache that has most of the path to `node`, and up to where."""
        pairs = [(cache, Tree.common(cache.node, node)) for cache in idle]
        return max(pairs, key=lambda pair: (pair[1].end, pair[0].node is pair[1]), default=(None, self._root))

    def _saved(self, session_id: str, node: Node, above: Node) -> Node | None:
        """The deepest turn on the path to `node`, deeper than `above`, of which there is a snapshot."""
        while node.depth > above.depth and node.parent is not None:
            if self._runtime.has_snapshot(session_id, node.number):
                return node
            node = node.parent
        return None

    def _claimed(self, cache: Cache) -> bool:
        """Claim the cache. One that is gone or has failed is forgotten."""
        self._caches.remove(cache)
        try:
            cache.claim = self._runtime.claim(cache.session_id, self._owner)
        except (SessionFailed, SessionNotFound):
            return False
        self._caches.append(cache)
        return True

    async def _open(self, forest: Claim, source: Cache | None, saved: Node | None = None) -> Cache:
        """A new cache; where all slabs are busy, one of our own that rests."""
        self._num_opening += 1
        node = saved or self._root
        try:
            if source is not None and self._claimed(source):
                assert source.claim is not None
                try:
                    node = source.node
                    session_id = await self._runtime.open_cache(forest, source.claim)
                finally:
                    await self.give_back(source)
            else:
                turns = [part.turn for part in node.path()]
                session_id = await self._runtime.open_cache(forest, turns=turns)
        except CapacityExhausted:
            resting = [cache for cache in self._caches if cache.claim is None]
            if cache := next((cache for cache in resting if self._claimed(cache)), None):
                return cache
            raise
        finally:
            self._num_opening -= 1
            self._returned.set()
        cache = Cache(session_id=session_id, node=node)
        self._caches.append(cache)
        cache.claim = self._runtime.claim(session_id, self._owner)
        return cache

    async def give_back(self, cache: Cache) -> None:
        """What a turn has left uncommitted is rolled back. A cache for which that is not possible is closed."""
        claim = cache.claim
        assert claim is not None
        try:
            await cache.rollback(claim)
        except HoldfastError as exc:
            logger.warning("a cache of a conversation is dropped: %s", exc)
        if cache.node.number:
            await self._runtime.name_snapshot(claim, cache.node.number)
        await claim.release()
        cache.claim = None
        if cache.needs_rewind or claim.session.failure or claim.session.gate.is_closed:
            await self._drop(cache)
        self._returned.set()

    async def _drop(self, cache: Cache) -> None:
        if cache in self._caches:
            self._caches.remove(cache)
        await self._runtime.drop_cache(cache.session_id, self._owner)
