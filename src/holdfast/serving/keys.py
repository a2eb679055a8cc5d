"""API keys and owners: every key has an owner, and every session belongs to one."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import ConfigError, Unauthenticated

LOCAL_OWNER = "local"  # everyone, where no keys are set
ADMIN = "admin"  # who may pause turns, say which weights are in use, and see to closed sessions of anyone


def is_admin(owner: str) -> bool:
    """Whether they may do what concerns all owners: `admin`, or anyone where no keys are set."""
    return owner in (ADMIN, LOCAL_OWNER)


class Keys:
    """API keys by owner. Only digests are kept, and compared in constant time."""

    def __init__(self, owners: Mapping[str, str] | None = None) -> None:
        """`owners`: key -> owner. Empty: no key is needed."""
        self._owners = {_digest(key): owner for key, owner in (owners or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner_of(self, authorization: Sequence[str], api_keys: Sequence[str] = ()) -> str:
        """The owner for the `authorization` and `x-api-key` headers or metadata values of a request, of which there is
        one each at most. Where both are there, they must be the same key."""
        if len(authorization) > 1 or len(api_keys) > 1:
            name = "authorization" if len(authorization) > 1 else "x-api-key"
            raise Unauthenticated(f"the request has several {name} headers; send one")
        if not self._owners:
            return LOCAL_OWNER
        scheme, _, key = "".join(authorization).partition(" ")
        key, other = key.strip() if scheme.lower() == "bearer" else "", "".join(api_keys).strip()
        if (authorization and not key) or not (key or other):
            raise Unauthenticated("an API key is required: send 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        if key and other and not hmac.compare_digest(_digest(key), _digest(other)):
            raise Unauthenticated("authorization and x-api-key are different keys; send one")
        given, found = _digest(key or other), None
        for digest, owner in self._owners.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, given):
                found = owner
        if found is None:
            raise Unauthenticated("the API key is not valid for this server")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(path: str) -> Keys:
    """Keys from a file of OWNER:KEY lines; blank lines and # comments are passed over."""
    if not path:
        return Keys()
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the keys file {path}: {exc}") from exc
    owners: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        owner, _, key = (part.strip() for part in line.partition(":"))
        if not owner or not key or len(key.split()) > 1:
            raise ConfigError(f"line {number} of {path} is not OWNER:KEY")
        if owner == LOCAL_OWNER:
            raise ConfigError(
                f"line {number} of {path}: the owner name {LOCAL_OWNER!r} is reserved for servers without keys"
            )
        if key in owners:
            raise ConfigError(f"line {number} of {path} repeats a key")
        owners[key] = owner
    if not owners:
        raise ConfigError(f"{path} contains no keys")
    return Keys(owners)


def check_bind(address: str, keys: Keys, *, insecure: bool) -> None:
    """Refuse to listen beyond loopback without API keys."""
    host = split_address(address)[0]
    if keys or insecure or is_loopback(host):
        return
    raise ConfigError(
        f"refusing to listen on {address} without API keys: anyone could use it; "
        "pass --keys-file, listen on 127.0.0.1, or pass --insecure"
    )


def check_free(address: str) -> None:
    """Find out now, not after a model was loaded, that an address is taken or not ours."""
    host, port = split_address(address)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as exc:
        raise ConfigError(f"cannot listen on {address}: {exc.strerror or exc}; choose another address") from exc


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    is_ipv6 = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not is_ipv6) or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT (an IPv6 host goes in brackets)")
    return (host[1:-1] if is_ipv6 else host), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
