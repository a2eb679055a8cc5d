"""One member of a cluster as a Ray actor, which keeps one `holdfast serve` running as a child process.

Ray places the actor, and starts it again, perhaps on another machine, where it dies. No request passes through it.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.cli.supervision import SERVE, ServerChild, Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class RayMemberStatus:
    """`http` is empty until the server serves; `error` is why it could not, the last time."""

    node: str
    pid: int | None
    http: str
    num_restarts: int
    num_failures: int
    error: str


class RayMember:
    """Its server ends with the actor, and runs again, under the same name, where the actor does."""

    def __init__(
        self, name: str, flags: Sequence[str], settings: Mapping[str, str], ports: tuple[int, int], drain_s: float
    ) -> None:
        """`settings`: environment variables; `ports`: of HTTP and gRPC on the machine where this runs, 0: free ones."""
        import ray

        self._node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        host = f"[{self._node}]" if ":" in self._node else self._node
        own = [f"--member={name}", f"--http={host}:{ports[0]}", f"--grpc={host}:{ports[1]}"]
        self._child = ServerChild(name, [*SERVE, *flags, *own], {**os.environ, **settings})
        self._supervisor = Supervisor([self._child], drain_s=drain_s, persists=True)
        self._thread = threading.Thread(target=self._supervisor.run, daemon=True)
        self._thread.start()

    def status(self) -> RayMemberStatus:
        child = self._child
        process, report = child.process, child.report
        return RayMemberStatus(
            node=self._node,
            pid=process.pid if process else None,
            http=report.http if report else "",
            num_restarts=max(0, child.num_starts - 1),
            num_failures=child.num_failures,
            error=child.last_error,
        )

    def drain(self) -> None:
        """Blocks until the server has handed its sessions over and ended."""
        self._supervisor.stop()
        self._thread.join()
