"""gRPC calls for sessions that another member owns: messages, metadata, deadline and status pass as bytes, both ways.

A call is sent again only where the member did nothing of it: it said so, or was not reached. One hop at most.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from holdfast.config import ServeConfig
from holdfast.errors import RecordUncertain, SessionElsewhere
from holdfast.metrics import Metrics
from holdfast.serving.cluster.membership import FORWARDED, Cluster, Outcome, Peer, is_forwarded

_CONNECT_S = 2.0
_SAFE = ("GetSessionInfo", "GetHistory", "SearchHistory", "ExportSession")  # methods that change nothing
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # whatever another member may send
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, whatever became of the one before
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 300_000),
]
_READY = grpc.ChannelConnectivity.READY
_BROKEN = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)

Local = Callable[[], AsyncGenerator[Any, None]]


class OwnerAnswered(Exception):
    """The error with which the owner of a session answered, to be passed on as it is."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.code = error.code()
        self.message = error.details() or ""
        self.trailing_metadata = tuple(error.trailing_metadata() or ())


class _Unanswered(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class GrpcForwarder:
    """One channel for each member that is called."""

    def __init__(self, cluster: Cluster, config: ServeConfig, metrics: Metrics) -> None:
        self._cluster = cluster
        self._forwards = metrics.cluster_forwards
        self._ca = Path(config.peer_ca).read_bytes() if config.peer_ca else None
        self._channels: dict[str, tuple[int, Any]] = {}  # by name, with the epoch

    async def close(self) -> None:
        for _, channel in self._channels.values():
            await channel.close()

    async def answers(
        self, method: str, data: bytes, context: Any, owner: str, local: Local
    ) -> AsyncGenerator[Any, None]:
        """What `local` yields. Where it raises SessionElsewhere, the messages of the member that this names, as bytes.

        `method` is the full name. Raises OwnerAnswered with the owner's own error.
        """
        if any(name == FORWARDED for name, _ in context.invocation_metadata() or ()):
            is_forwarded.set(True)
            async with contextlib.aclosing(local()) as messages:
                async for message in messages:
                    yield message
            return
        attempts = self._cluster.attempts()
        while True:
            has_begun = False
            try:
                async with contextlib.aclosing(local()) as messages:
                    async for message in messages:
                        has_begun = True
                        yield message
                return
            except SessionElsewhere as exc:
                if has_begun:
                    raise
                elsewhere = exc
            try:
                async with contextlib.aclosing(self._forward(method, data, context, elsewhere.member)) as messages:
                    async for message in messages:
                        yield message
                self._count("answered")
                return
            except _Unanswered as exc:
                self._count(exc.outcome)
                await self._cluster.reconsider(elsewhere, owner, exc.outcome, attempts)

    async def _forward(self, method: str, data: bytes, context: Any, name: str) -> AsyncGenerator[bytes, None]:
        peer = await self._cluster.peer(name)
        channel = await self._connected(peer) if peer else None
        if peer is None or channel is None:
            raise _Unanswered("unreached")
        # As a stream, whatever the method: a call with one message is a stream of one on the wire.
        call = channel.unary_stream(method)(data, timeout=context.time_remaining(), metadata=self._metadata(context))
        num_messages = 0

        def stop(gone: Any) -> None:
            call.cancel()

        peer.gone.add_done_callback(stop)
        try:
            with peer.answering():
                async for message in call:
                    num_messages += 1
                    yield message
                context.set_trailing_metadata(tuple(await call.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            if num_messages == 0 and _is_refusal(error):
                raise _Unanswered("refused") from error
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) or _info(error):
                self._count("answered")
                raise OwnerAnswered(error) from error
            self._lost(method, name, num_messages, error)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if not peer.gone.done() or (task and task.cancelling()):
                raise
            self._lost(method, name, num_messages, exc)
        finally:
            peer.gone.remove_done_callback(stop)
            call.cancel()

    def _lost(self, method: str, name: str, num_messages: int, cause: BaseException) -> None:
        """The member stopped answering. Always raises."""
        if num_messages == 0 and method.rpartition("/")[2] in _SAFE:
            raise _Unanswered("lost") from cause
        self._count("lost")
        raise RecordUncertain(
            f"member {name} stopped answering in the middle of the call, which may be on record; "
            "read the session's history length before you send it again"
        ) from cause

    async def _connected(self, peer: Peer) -> Any:
        """A channel that is connected, or None."""
        name, epoch = peer.member.name, peer.member.epoch
        known, channel = self._channels.get(name, (0, None))
        if channel is None or known != epoch:
            old = [one for one in self._channels if one == name or not self._cluster.is_alive(one)]
            closed = [self._channels.pop(one)[1] for one in old]
            channel = self._new_channel(peer)
            self._channels[name] = epoch, channel
            for one in closed:
                await one.close()
        state = channel.get_state(try_to_connect=True)
        if state is _READY:
            return channel
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):  # another call may close it meanwhile
            async with asyncio.timeout(_CONNECT_S):
                while state is not _READY and state not in _BROKEN:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        if state is _READY:
            return channel
        if self._channels.get(name) == (epoch, channel):
            del self._channels[name]
        await channel.close()
        return None

    def _new_channel(self, peer: Peer) -> Any:
        if not peer.member.has_tls:
            return grpc.aio.insecure_channel(peer.member.grpc, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(self._ca)
        return grpc.aio.secure_channel(peer.member.grpc, credentials, options=_OPTIONS)

    def _metadata(self, context: Any) -> tuple[tuple[str, Any], ...]:
        """The client's own, by which the owner of the session authenticates it again."""
        given = context.invocation_metadata() or ()
        kept = [(name, value) for name, value in given if name != "user-agent" and not name.startswith("grpc-")]
        return (*kept, (FORWARDED, self._cluster.name))

    def _count(self, outcome: Outcome) -> None:
        self._forwards.labels("grpc", outcome).inc()


def _info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """What a Holdfast server says of an error; None where the error is the connection's."""
    with contextlib.suppress(ValueError):
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        for detail in status.details if status else ():
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                return info
    return None


def _is_refusal(error: grpc.aio.AioRpcError) -> bool:
    info = _info(error)
    return info is not None and (info.reason == "session_elsewhere" or info.metadata["accepted"] == "false")
