"""Where a client may connect and where a key may go."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from both import every, settled
from conftest import Connect
from fake_server import FakeServer
from holdfast_sdk import AsyncClient, Client, __version__, errors
from holdfast_sdk.address import Address, is_loopback

LOCAL = [
    "127.0.0.1:1",
    "127.9.8.7:1",
    "localhost:1",
    "api.localhost:1",
    "[::1]:1",
    "unix:/tmp/x",
    "dns:///localhost:1",
    "dns:localhost:1",
    "ipv4:127.0.0.1:1",
    "ipv6:[::1]:1",
]
REMOTE = ["10.0.0.1:1", "example.com:1", "[2001:db8::1]:1", "dns:///example.com:1", "0.0.0.0:1", "localhost.evil.com:1"]


@pytest.mark.parametrize("address", LOCAL)
def test_these_stay_on_this_machine(address: str) -> None:
    assert is_loopback(address)
    Client(address, api_key="k").close()


@pytest.mark.parametrize("address", REMOTE)
def test_a_key_is_not_sent_elsewhere_in_plain_text(address: str) -> None:
    assert not is_loopback(address)
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="plain text"):
            kind(address, api_key="k")
    Client(address, api_key="k", insecure=True).close()
    Client(address, api_key="k", tls=True).close()
    Client(address).close()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "https://example.com", "127.0.0.1", ":1", "host:port", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        Client(address)


@pytest.mark.parametrize("key", ["", " sesame", "sesame\n", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match="API key") as caught:
        Client("127.0.0.1:1", api_key=key)
    assert not key or key not in str(caught.value)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Address.checked("127.0.0.1:1", api_key="secret", tls=None, insecure=False))


async def test_every_call_carries_the_key(connect: Connect, server: FakeServer) -> None:
    client = connect(api_key="secret")
    session = await settled(client.create_session(token_ids=[1]))
    generation = await settled(session.generate(max_tokens=1))
    assert len(await every(generation)) == 1
    await settled(client.import_session(await every(session.export())))
    sent = server.faults.metadata
    assert [call["authorization"] for call in sent] == ["Bearer secret"] * 4
    assert all(str(call["user-agent"]).startswith(f"holdfast-sdk-python/{__version__}") for call in sent)


async def test_without_a_key_none_is_sent(client: Any, server: FakeServer) -> None:
    await settled(client.model_info())
    assert "authorization" not in server.faults.metadata[0]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key, made now."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command.split(), *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_tls_with_given_roots(certificate: tuple[Path, Path], connect: Connect) -> None:
    cert, key = certificate
    server = FakeServer(tls=(key.read_bytes(), cert.read_bytes())).start()
    try:
        for roots in (cert, str(cert), cert.read_bytes()):
            await settled(connect(server.address, tls=roots, api_key="secret").model_info())
        assert [sent["authorization"] for sent in server.faults.metadata] == ["Bearer secret"] * 3
        with pytest.raises(errors.ConnectionFailed):
            await settled(connect(server.address, tls=True, retries=0).model_info())
    finally:
        server.stop()
