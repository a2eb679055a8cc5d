"""Where a session's backend stands in the tree of its turns, and how it gets elsewhere."""

import contextlib
from collections.abc import Iterator

from holdfast.chats.trajectory import Trajectory
from holdfast.chats.tree import Node
from holdfast.errors import HistoryConflict, SessionBusy
from holdfast.sessions.runtime import Runtime


async def sync_to(runtime: Runtime, trajectory: Trajectory, node: Node) -> tuple[Node, int]:
    """Rewind to the deepest turn that the backend shares with the path to `node`; that turn, and how many tokens
    had to be computed again. What another door has appended is never rewound: HistoryConflict."""
    session_id, owner = trajectory.session_id, trajectory.owner
    length = runtime.info(session_id, owner).history_length
    if length != trajectory.synced_node.end and not trajectory.needs_rewind:
        raise HistoryConflict(expected=trajectory.synced_node.end, actual=length)
    base = trajectory.tree.common(trajectory.synced_node, node)
    recomputed = 0
    if length > base.end:
        recomputed = (
            await runtime.rewind(session_id, owner, base.end, writes="chat", is_limited=not trajectory.needs_rewind)
        ).recomputed_tokens
    trajectory.synced_node, trajectory.needs_rewind = base, False
    return base, recomputed


@contextlib.contextmanager
def uncommitted(trajectory: Trajectory) -> Iterator[None]:
    """From here on the backend holds more than is recorded, which has to be taken back unless it is committed.

    Where another door was faster nothing of ours is there, and what is there is not ours to take back.
    """
    trajectory.needs_rewind = True
    try:
        yield
    except (HistoryConflict, SessionBusy):
        trajectory.needs_rewind = False
        raise


async def rollback(runtime: Runtime, trajectory: Trajectory) -> None:
    """Rewind what a turn that came to nothing has left behind."""
    session_id, owner, end = trajectory.session_id, trajectory.owner, trajectory.synced_node.end
    if runtime.info(session_id, owner).history_length > end:
        await runtime.rewind(session_id, owner, end, writes="chat", is_limited=False)
    trajectory.needs_rewind = False
