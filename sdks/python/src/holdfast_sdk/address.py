"""Where a client connects to and what it may send there: address, TLS, API key, channel options."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from holdfast_sdk.version import VERSION

Certificates = bool | bytes | str | os.PathLike[str] | None
MAX_MESSAGE_BYTES = 256 << 20
CONNECT_MS = 2000  # for a connection, TLS included; where there are other addresses the next one is tried then


@dataclass(frozen=True, slots=True)
class Address:
    """A checked `host:port` (or `unix:path`) with what goes along on every call."""

    target: str
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...] = field(repr=False)  # holds the key
    options: tuple[tuple[str, str | int], ...]

    @classmethod
    def checked(cls, target: str, *, api_key: str | None, tls: Certificates, insecure: bool) -> "Address":
        is_local = is_loopback(target)
        credentials = None if tls is None or tls is False else grpc.ssl_channel_credentials(_read(tls))
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
                raise ValueError("the API key is empty or holds characters that cannot be sent")
            if credentials is None and not is_local and not insecure:
                raise ValueError(
                    f"the API key would travel in plain text to {target}; "
                    "use tls=True, or insecure=True if the network is trusted"
                )
        options: list[tuple[str, str | int]] = [
            ("grpc.primary_user_agent", f"holdfast-sdk-python/{VERSION}"),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Without these a lost connection is not tried again for a second, longer than our own first pauses.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # gRPC's name for how long an attempt to connect may take
            ("grpc.max_reconnect_backoff_ms", 5000),
        ]
        if is_local:
            options.append(("grpc.enable_http_proxy", 0))
        metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        return cls(target, credentials, metadata, tuple(options))


def addresses_of(
    targets: str | Sequence[str], *, api_key: str | None, tls: Certificates, insecure: bool
) -> tuple[Address, ...]:
    """One address or several, in the order in which they are to be used."""
    given = (targets,) if isinstance(targets, str) else tuple(targets)
    if not given:
        raise ValueError("the list of addresses is empty; give at least one host:port")
    return tuple(Address.checked(target, api_key=api_key, tls=tls, insecure=insecure) for target in given)


def is_loopback(target: str) -> bool:
    """Whether the address stays on this machine; one that is no address is refused."""
    if "://" in target and not target.startswith("dns://"):
        raise ValueError(f"{target!r} is a URL; give the gRPC door as host:port")
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host, _, port = target.rsplit("/", 1)[-1].removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")
    host = host.removeprefix("dns:").strip("[]")
    if not host or not port.isdecimal():
        raise ValueError(f"{target!r} is not host:port")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _read(tls: bool | bytes | str | os.PathLike[str]) -> bytes | None:
    """Root certificates; None for the ones that gRPC brings."""
    if isinstance(tls, bool):
        return None
    return tls if isinstance(tls, bytes) else Path(tls).read_bytes()
