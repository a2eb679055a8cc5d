"""The APIs for chats, and which path belongs to which: requests become chat completion requests, replies theirs."""

import re

from holdfast.serving.http.dialects.base import Dialect
from holdfast.serving.http.dialects.chat import ChatDialect
from holdfast.serving.http.dialects.messages import MessagesDialect
from holdfast.serving.http.dialects.responses import ResponsesDialect

CHAT: Dialect = ChatDialect()
MESSAGES: Dialect = MessagesDialect()
RESPONSES: Dialect = ResponsesDialect()

_PATHS = (
    (re.compile(r"(/sessions/[^/]*)?/v1/messages(/.*)?"), MESSAGES),
    (re.compile(r"(/sessions/[^/]*)?/v1/(responses|conversations)(/.*)?"), RESPONSES),
)


def dialect_of(path: str) -> Dialect:
    """The API that a path belongs to, whether or not there is such a path."""
    return next((dialect for pattern, dialect in _PATHS if pattern.fullmatch(path)), CHAT)
