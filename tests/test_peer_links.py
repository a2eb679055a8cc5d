"""Connections between members: used again only where that loses nothing, and a response that breaks off is never a
whole one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.serving.cluster import peer_links
from holdfast.serving.cluster.peer_links import LinkLost, PeerLink, PeerLinks, plain_head

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
END = b"<end>"


@pytest.fixture(autouse=True, params=["plain", "parsed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain responses are read in a way of their own; the other way is for all."""
    if request.param == "parsed":
        monkeypatch.setattr(peer_links, "plain_head", lambda head: None)


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


async def test_what_comes_after_a_response_is_no_response_to_the_next_request() -> None:
    async with answering(HEAD + b"hello" + HEAD + b"wrong", HEAD + b"right") as (there, links, address):
        assert await ask(links, address) == (200, b"hello")
        assert await ask(links, address) == (200, b"right")
        assert there.num_connections == 2


async def test_a_response_to_head_has_no_body() -> None:
    async with answering(HEAD, HEAD + b"hello") as (_, links, address):
        link = await links.take(address, has_tls=False)
        link.send("HEAD", b"/", [(b"host", b"x")], b"")
        assert (await link.head())[0] == 200
        assert await link.chunk() == (b"", True)
        links.give_back(link)
        assert await ask(links, address) == (200, b"hello")


LINES = [b"a: b", b"X-Y:  c ", b"x:", b"x : y", b"\xff: 1"]
LINES += [b"x: \xff", b"x: a\tb", b"x: \0", b" folded", b"no colon", b""]
LINES += [
    b"content-length: 5",
    b"Content-Length:5 ",
    b"content-length: 5, 5",
    b"content-length: +5",
    b"content-length: ",
]
LINES += [b"transfer-encoding: chunked", b"connection: close", b"upgrade: x", b"content-length: 0", b"x: y\nz: w"]
STATUS = [b"HTTP/1.1 200 OK", b"HTTP/1.1 503 ", b"HTTP/1.1 204 No Content", b"HTTP/1.1 103 Hints", b"HTTP/1.0 200 OK"]


@given(st.sampled_from(STATUS), st.lists(st.sampled_from(LINES), max_size=4))
def test_a_plain_head_is_what_the_parser_says(status_line: bytes, lines: list[bytes]) -> None:
    head = b"\r\n".join([status_line, *lines])
    if b"" in lines or (found := plain_head(head)) is None:
        return
    parser = h11.Connection(h11.CLIENT)
    for sent in (h11.Request(method="GET", target=b"/", headers=[(b"host", b"-")]), h11.EndOfMessage()):
        parser.send(sent)
    status, headers, length = found
    parser.receive_data(head + b"\r\n\r\n" + bytes(length))
    response = parser.next_event()
    assert isinstance(response, h11.Response)
    assert (response.status_code, list(response.headers)) == (status, headers)
    if length:
        body = parser.next_event()
        assert isinstance(body, h11.Data)
        assert len(body.data) == length
    assert isinstance(parser.next_event(), h11.EndOfMessage)
    assert parser.their_state is h11.DONE


def test_nearly_all_heads_are_plain() -> None:
    head = b"HTTP/1.1 200 OK\r\ndate: now\r\nContent-Length: 5\r\nx-y: \xc3\xa4"
    headers = [(b"date", b"now"), (b"content-length", b"5"), (b"x-y", b"\xc3\xa4")]
    assert plain_head(head) == (200, headers, 5)
