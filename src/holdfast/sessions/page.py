"""Which of an owner's sessions are listed: filters and pages, for any door."""

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.errors import InvalidArgument
from holdfast.sessions.view import SessionState, SessionView

MAX_PAGE = 1000


class Page(NamedTuple):
    """`next_token` is empty where there are no more."""

    views: list[SessionView]
    next_token: str


def page_of(
    views: Iterable[SessionView], *, label: str | None = None, state: SessionState | None = None, size: int | None
) -> Page:
    """The first `size` of the views that fit, which come by number; with None all of them."""
    if size is not None and not 1 <= size <= MAX_PAGE:
        raise InvalidArgument(f"page_size must be 1 to {MAX_PAGE}, got {size}", param="page_size")
    fitting = [
        view for view in views if (label is None or view.label == label) and (state is None or view.state is state)
    ]
    if size is None or len(fitting) <= size:
        return Page(fitting, "")
    return Page(fitting[:size], str(fitting[size - 1].number))


def page_start(token: str) -> int:
    """After which session a page begins."""
    if token and not (token.isascii() and token.isdigit() and len(token) < 20):
        raise InvalidArgument("page_token: not one that this server has given", param="page_token")
    return int(token or 0)
