"""Connections between members: used again only where that loses nothing, and a response that breaks off is never a
whole one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from holdfast.serving.cluster.peer_links import LinkLost, PeerLink, PeerLinks

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
END = b"<end>"


class Answering:
    """A server that answers each request with the next of `replies`, and after an END closes the connection."""

    def __init__(self, *replies: bytes) -> None:
        self.replies = list(replies)
        self.num_connections = 0
        self.asked = b""
        self.tasks: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.replies:
                self.asked = await reader.readuntil(b"\r\n\r\n")
                reply, end, _ = self.replies.pop(0).partition(END)
                writer.write(reply)
                if end:
                    break
            else:
                await reader.read()
        writer.close()


@contextlib.asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[tuple[Answering, PeerLinks, str]]:
    there, links = Answering(*replies), PeerLinks("")
    server = await asyncio.start_server(there.serve, "127.0.0.1", 0)
    async with server:
        try:
            yield there, links, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            links.close()
            await asyncio.gather(*filter(None, there.tasks))


async def ask(links: PeerLinks, address: str) -> tuple[int, bytes]:
    link = await links.take(address, has_tls=False)
    try:
        link.send("GET", b"/sessions?a=%20b", [(b"host", b"x")], b"")
        status, _ = await link.head()
        return status, await body_of(link)
    finally:
        links.give_back(link)


async def body_of(link: PeerLink) -> bytes:
    body, is_last = b"", False
    while not is_last:
        part, is_last = await link.chunk()
        body += part
    return body


async def test_a_connection_is_used_again_until_either_side_closes_it() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </>\r\n\r\n"
    chunked = b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    last = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with answering(HEAD + b"hello", hints + chunked, last + b"hello", HEAD + b"hello") as (there, links, address):
        assert [await ask(links, address) for _ in range(3)] == [(200, b"hello"), (201, b"hello"), (200, b"hello")]
        assert there.num_connections == 1
        assert there.asked.startswith(b"GET /sessions?a=%20b HTTP/1.1\r\n")
        assert await ask(links, address) == (200, b"hello")
        assert there.num_connections == 2


async def test_a_connection_that_was_closed_while_it_was_idle_is_not_used_again() -> None:
    async with answering(HEAD + b"hello" + END, HEAD + b"again") as (there, links, address):
        assert await ask(links, address) == (200, b"hello")
        await asyncio.sleep(0.05)  # the end has arrived by then
        assert await ask(links, address) == (200, b"again")
        assert there.num_connections == 2


@pytest.mark.parametrize(
    "reply", [b"", HEAD[:20], HEAD + b"hel", HEAD.replace(b"5", b"x") + b"hello", b"SSH-2.0\r\n\r\n"]
)
async def test_a_response_that_breaks_off_or_is_no_http_is_lost(reply: bytes) -> None:
    async with answering(reply + END) as (_, links, address):
        with pytest.raises((LinkLost, ConnectionResetError)):
            await ask(links, address)


async def test_whoever_reads_is_told_why_the_response_is_given_up_and_the_connection_is_closed() -> None:
    async with answering(HEAD + b"hel", HEAD + b"hello") as (there, links, address):
        link = await links.take(address, has_tls=False)
        link.send("POST", b"/", [(b"host", b"x"), (b"content-length", b"0")], b"")
        assert (await link.head())[0] == 200
        reading = asyncio.ensure_future(body_of(link))
        await asyncio.sleep(0.01)
        link.fail(KeyError("gone"))
        with pytest.raises(KeyError, match="gone"):
            await reading
        links.give_back(link)
        assert await ask(links, address) == (200, b"hello")
        assert there.num_connections == 2


async def test_a_member_that_does_not_listen_is_refused() -> None:
    async with answering() as (_, links, address):
        pass
    with pytest.raises(ConnectionRefusedError):
        await ask(links, address)
