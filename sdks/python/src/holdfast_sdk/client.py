"""The door to a Holdfast server, for blocking code."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

from holdfast_sdk import client_flows
from holdfast_sdk.address import Certificates, addresses_of
from holdfast_sdk.client_flows import DEFAULT_PAGE_SIZE
from holdfast_sdk.errors import HoldfastError
from holdfast_sdk.flow import Limits
from holdfast_sdk.outgoing import Outgoing
from holdfast_sdk.results import Cluster, ModelInfo, SessionInfo, SessionState
from holdfast_sdk.session import Session
from holdfast_sdk.session_flows import SessionFlows
from holdfast_sdk.wire import Wire


class Client:
    """A connection to the gRPC door at `address` (`host:port`). Threads may share it.

    Several addresses are members of one cluster: the first is used until it is gone, then the next, round and round.
    `tls`: True for the public roots, or root certificates as a path or bytes. `timeout_s` bounds every call, all its
    attempts together (None: no bound). `retries`: how often a call that is safe to repeat is sent again, to each
    address. An API key goes over TLS or to this machine only, unless `insecure`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Certificates = None,
        timeout_s: float | None = 60.0,
        retries: int = 3,
        insecure: bool = False,
    ) -> None:
        addresses = addresses_of(address, api_key=api_key, tls=tls, insecure=insecure)
        self._limits = Limits(timeout_s, retries, len(addresses))
        self._wire = Wire(addresses)

    def create_session(
        self,
        *,
        label: str = "",
        token_ids: Iterable[int] = (),
        pin_tokens: int | None = None,
        eos_token_ids: Iterable[int] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> Session:
        """A new session. `pin_tokens` first tokens stay visible for ever; `eos_token_ids` end its generations."""
        flow = client_flows.create_session(
            self._limits,
            label=label,
            token_ids=token_ids,
            pin_tokens=pin_tokens,
            eos_token_ids=eos_token_ids,
            metadata=metadata,
        )
        created = self._wire.run(flow)
        flows = SessionFlows(created.session_id, self._limits, created.history_length)
        return Session(self._wire, flows, created)

    def session(self, session_id: str) -> Session:
        """A handle on a session that exists. Makes no call."""
        return Session(self._wire, SessionFlows(session_id, self._limits))

    def model_info(self) -> ModelInfo:
        return self._wire.run(client_flows.model_info(self._limits))

    def cluster(self) -> Cluster:
        """The members of the cluster, as the one that answers sees them."""
        return self._wire.run(client_flows.cluster(self._limits))

    def list_sessions(
        self, label: str | None = None, state: SessionState | None = None, page_size: int = DEFAULT_PAGE_SIZE
    ) -> Iterator[SessionInfo]:
        """All sessions with this label and state; pages are fetched as they are needed."""
        page_token = ""
        while True:
            flow = client_flows.page_of_sessions(self._limits, label, state, page_size, page_token)
            infos, page_token = self._wire.run(flow)
            yield from infos
            if not page_token:
                return

    def import_session(self, chunks: Iterable[bytes], *, timeout_s: float | None = None) -> Session:
        """A new session with exactly the tokens of what `Session.export` gave, or InvalidArgument says why not.

        `origin` says how many tokens were computed again. Takes as long as it takes, unless told otherwise.
        """
        outgoing = Outgoing(chunks)
        try:
            imported = self._wire.run(client_flows.import_session(self._limits, outgoing.messages(), timeout_s))
        except HoldfastError as error:
            if outgoing.failure:
                raise outgoing.failure from error
            raise
        return Session(self._wire, SessionFlows(imported.session_id, self._limits, imported.history_length), imported)

    def close(self) -> None:
        """Close the connection; sessions stay on the server."""
        self._wire.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
