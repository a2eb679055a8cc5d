"""Who keeps more about a chat than its tokens: its turns, which travel with it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from holdfast.sessions.journal.base import StoredSession
from holdfast.sessions.portable.content import PortableTurn


@dataclass(frozen=True, slots=True)
class ChatContent:
    turns: tuple[PortableTurn, ...]
    reward: float | None


class ChatPort(Protocol):
    @property
    def template_hash(self) -> str:
        """Of the template that chats are rendered with, the server's own choice included."""

    def exported(self, session_id: str, owner: str) -> AbstractAsyncContextManager[ChatContent]:
        """All that is on record of a chat, which takes no turn while the context lasts. SessionBusy where one runs."""

    def prepared(self, stored: StoredSession, turns: Sequence[PortableTurn]) -> Callable[[], None]:
        """Checks that a chat with these turns could go on here, or raises SessionFileRefused; blocks, changes nothing.

        What it gives, called on the loop, takes the chat over.
        """
