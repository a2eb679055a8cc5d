"""Where a session's backend stands in the tree of its turns, and how it gets elsewhere."""

import contextlib
from collections.abc import Iterator

from holdfast.errors import HistoryConflict, SessionBusy
from holdfast.sessions.runtime import Runtime
from holdfast.trajectories.trajectory import Trajectory
from holdfast.trajectories.tree import Node


async def go_back(runtime: Runtime, trajectory: Trajectory, node: Node) -> tuple[Node, int]:
    """Rewind to the deepest turn that the backend shares with the path to `node`; that turn, and how many tokens
    had to be computed again. What another door has appended is never rewound: HistoryConflict."""
    session_id, owner = trajectory.session_id, trajectory.owner
    length = runtime.info(session_id, owner).history_length
    if length != trajectory.stands_at.end and not trajectory.owes_rewind:
        raise HistoryConflict(expected=trajectory.stands_at.end, actual=length)
    base = trajectory.tree.common(trajectory.stands_at, node)
    recomputed = 0
    if length > base.end:
        recomputed = (
            await runtime.rewind(session_id, owner, base.end, writes="chat", is_limited=not trajectory.owes_rewind)
        ).recomputed_tokens
    trajectory.stands_at, trajectory.owes_rewind = base, False
    return base, recomputed


@contextlib.contextmanager
def changing(trajectory: Trajectory) -> Iterator[None]:
    """From here on the backend holds more than is recorded, which has to be taken back unless it is committed.

    Where another door was faster nothing of ours is there, and what is there is not ours to take back.
    """
    trajectory.owes_rewind = True
    try:
        yield
    except (HistoryConflict, SessionBusy):
        trajectory.owes_rewind = False
        raise


async def take_back(runtime: Runtime, trajectory: Trajectory) -> None:
    """Rewind what a turn that came to nothing has left behind."""
    session_id, owner, end = trajectory.session_id, trajectory.owner, trajectory.stands_at.end
    if runtime.info(session_id, owner).history_length > end:
        await runtime.rewind(session_id, owner, end, writes="chat", is_limited=False)
    trajectory.owes_rewind = False
