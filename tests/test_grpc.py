"""The gRPC door over real sockets."""

import asyncio
import contextlib
import random
import ssl
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from holdfast.engine.torch import TorchEngine
from holdfast.errors import ConfigError, EngineDied
from holdfast.generation import Sampled, Truncated
from holdfast.serving.grpc import convert
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.grpc.server import SERVICE
from tests.serving import VOCABULARY, Server, SlowEngine, held, serving
from tests.talking import eventually, until


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(SlowEngine()) as server:
        yield server


def engine_of(server: Server) -> SlowEngine:
    assert isinstance(server.worker.engine, SlowEngine)
    return server.worker.engine


@contextlib.asynccontextmanager
async def refused(status: grpc.StatusCode, code: str, **details: str) -> AsyncIterator[None]:
    """The call inside must fail with this status, this ErrorInfo reason and these facts."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    error = caught.value
    assert error.code() is status, error.details()
    (detail,) = rpc_status.from_call(error).details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert (info.reason, info.domain) == (code, "holdfast")
    assert details.items() <= dict(info.metadata).items()


async def create(server: Server, tokens: list[int] | None = None, **fields: Any) -> str:
    response = await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=tokens or [], **fields))
    return str(response.session_id)


def generate(server: Server, session: str, max_tokens: int = 5, **sampling: Any) -> Any:
    options = pb.SamplingOptions(**{"temperature": 0, "seed": 1} | sampling)
    return server.stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=max_tokens, sampling=options))


async def events_of(call: Any) -> list[pb.GenerateEvent]:
    """What is still to come; goes on after a read()."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def tokens_of(call: Any) -> list[int]:
    return [event.token.token_id for event in await events_of(call) if event.HasField("token")]


async def info(server: Server, session: str) -> pb.SessionInfo:
    found = await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
    assert isinstance(found, pb.SessionInfo)
    return found


async def history(server: Server, session: str) -> list[int]:
    call = server.stub.GetHistory(pb.GetHistoryRequest(session_id=session))
    return [token async for chunk in call for token in chunk.token_ids]


async def test_reflection_lists_the_service_and_its_methods(server: Server) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)

    async def ask(**request: str) -> Any:
        async for answer in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)])):
            return answer

    listed = await ask(list_services="")
    assert SERVICE in [service.name for service in listed.list_services_response.service]
    described = await ask(file_containing_symbol=SERVICE)
    assert b"GetHistory" in described.file_descriptor_response.file_descriptor_proto[0]


async def test_health_flips_to_not_serving_on_drain() -> None:
    engine = SlowEngine()
    async with contextlib.AsyncExitStack() as stack:
        leaving = contextlib.AsyncExitStack()
        server = await leaving.enter_async_context(serving(engine, drain_s=60))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        seen = [(await watch.read()).status]
        session = await create(server, [1])
        other = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        sampling = pb.SamplingOptions(temperature=0)
        running = other.Generate(pb.GenerateRequest(session_id=session, max_tokens=300, sampling=sampling))
        await running.read()
        with held(engine):
            closing = asyncio.create_task(leaving.aclose())
            seen.append((await watch.read()).status)
            assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
            async with refused(grpc.StatusCode.UNAVAILABLE, "draining"):
                await other.CreateSession(pb.CreateSessionRequest())
        assert len(await tokens_of(running)) == 299  # what ran may end
        await closing


async def test_a_server_whose_engine_died_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    async def until_dead() -> None:
        async with serving(SlowEngine()) as server:
            session = await create(server, [1])
            monkeypatch.setattr("holdfast.engine.scheduler.Scheduler.plan", lambda scheduler: 1 / 0)
            async with refused(grpc.StatusCode.UNAVAILABLE, "draining"):
                await generate(server, session).read()
            await asyncio.sleep(30)

    with pytest.raises(ExceptionGroup) as caught:
        await until_dead()
    assert caught.group_contains(EngineDied, match="ZeroDivisionError")


async def test_drain_ends_what_outlasts_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with contextlib.AsyncExitStack() as stack:
        leaving = contextlib.AsyncExitStack()
        server = await leaving.enter_async_context(serving(SlowEngine(), drain_s=0.05))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        session = await create(server, [1])
        call = stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=1_000_000))
        await call.read()
        started = time.monotonic()
        closing = asyncio.create_task(leaving.aclose())
        async with refused(grpc.StatusCode.UNAVAILABLE, "draining"):
            await events_of(call)
        await closing
        assert time.monotonic() - started < 60  # of more than half an hour
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_busy_session_refuses_at_once_without_touching_the_engine(server: Server) -> None:
    session = await create(server, [1, 2, 3])
    alone = await create(server, [1, 2, 3])
    running = generate(server, session, 200)
    first = (await running.read()).token.token_id
    with held(engine_of(server)):  # whoever waited for the engine would get no answer
        for attempt in (
            lambda: generate(server, session).read(),
            lambda: server.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[1])),
            lambda: server.stub.RewindSession(pb.RewindSessionRequest(session_id=session)),
            lambda: server.stub.ForkSession(pb.ForkSessionRequest(session_id=session)),
        ):
            async with refused(grpc.StatusCode.ABORTED, "session_busy"):
                await asyncio.wait_for(attempt(), 30)
    assert [first, *await tokens_of(running)] == await tokens_of(generate(server, alone, 200))


async def test_two_sessions_interleaved_token_by_token_equal_the_same_two_alone(default_engine: TorchEngine) -> None:
    prompts = [[1, 9690, 198, 2683, 359], [1, 4093, 198, 1780, 314, 260, 3575]]
    async with serving(default_engine) as server:

        async def alone(prompt: list[int]) -> list[int]:
            session = await create(server, prompt)
            tokens = await tokens_of(generate(server, session, 20, temperature=0.8))
            await server.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
            return tokens

        expected = [await alone(prompt) for prompt in prompts]
        sessions = [await create(server, prompt) for prompt in prompts]
        calls = [generate(server, session, 20, temperature=0.8) for session in sessions]
        seen: list[list[int]] = [[], []]
        for _ in range(20):
            for tokens, call in zip(seen, calls, strict=True):
                tokens.append((await call.read()).token.token_id)
        assert seen == expected


async def test_killing_the_client_stops_the_engine_and_keeps_the_session() -> None:
    engine = SlowEngine(num_slabs=2)
    async with serving(engine) as server:
        session = await create(server, [1, 2, 3])
        expected = [1, 2, 3]
        source = random.Random(0)
        unheard: list[int] = []
        for _ in range(100):
            async with grpc.aio.insecure_channel(server.address) as doomed:
                stub = rpc.RuntimeServiceStub(doomed)  # type: ignore[no-untyped-call]
                options = pb.SamplingOptions(temperature=0)
                call = stub.Turn(
                    pb.TurnRequest(session_id=session, token_ids=[5, 6], max_tokens=100_000, sampling=options)
                )
                streamed = []
                for _ in range(source.randint(1, 6)):
                    message = await call.read()
                    streamed += [message.token.token_id] if message.HasField("token") else []
            await eventually(lambda: info(server, session), lambda view: not view.busy)
            expected += [5, 6, *streamed]
            now = await history(server, session)
            assert now[: len(expected)] == expected
            unheard.append(len(now) - len(expected))
            expected = now
            assert (await info(server, session)).history_length == len(now)
        assert max(unheard) < 5000  # of 100 000: a busy machine may take ten seconds to notice, once or twice
        assert statistics.median(unheard) < 50
        idle_since = engine.num_forwards
        assert len(await tokens_of(generate(server, session, 3))) == 3
        assert engine.num_forwards == idle_since + 3
        assert server.worker.num_free_slabs == 1
        assert (await info(server, session)).inv1_violations == 0


async def test_capacity_evicts_the_idle_session_used_least_recently(server: Server) -> None:
    sessions = [await create(server, [1, 2]) for _ in range(4)]
    for session in (sessions[0], sessions[2], sessions[3]):
        await tokens_of(generate(server, session, 1))
    newcomer = await create(server)
    async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="evicted"):
        await info(server, sessions[1])
    busy = [generate(server, session, 100_000) for session in (sessions[0], sessions[2], sessions[3])]
    for call in busy:
        await call.read()
    await create(server)  # the newcomer was idle: it goes
    async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="evicted"):
        await info(server, newcomer)
    for call in busy:
        call.cancel()


async def test_at_capacity_with_all_busy_there_is_no_room(server: Server) -> None:
    sessions = [await create(server, [1, 2]) for _ in range(4)]
    calls = [generate(server, session, 100_000) for session in sessions]
    for call in calls:
        await call.read()
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "capacity_exhausted"):
        await create(server)
    async with refused(grpc.StatusCode.ABORTED, "session_busy"):
        await server.stub.ForkSession(pb.ForkSessionRequest(session_id=sessions[0]))
    assert all([(await call.read()).HasField("token") for call in calls])
    for call in calls:
        call.cancel()


async def test_truncation_is_told_when_due_and_adds_up(server: Server) -> None:
    session = await create(server, [1] * 10)  # window of 4 + 16
    told: list[range] = []

    async def turn(num_given: int, num_sampled: int) -> list[str]:
        sampling = pb.SamplingOptions(temperature=0)
        request = pb.TurnRequest(
            session_id=session, token_ids=[2] * num_given, max_tokens=num_sampled, sampling=sampling
        )
        kinds = []
        async for event in server.stub.Turn(request):
            kinds.append(event.WhichOneof("event"))
            if kinds[-1] == "truncated":
                told.append(range(event.truncated.from_position, event.truncated.to_position))
        return kinds

    assert "truncated" not in await turn(3, 4)
    assert (await turn(1, 6)).index("truncated") == 3  # 18 + 2 fit, the third sampled one pushes one out
    assert (await turn(9, 1))[0] == "truncated"
    await turn(1, 1)
    last = await turn(1, 1)
    assert last[0] == "truncated"
    positions = [position for part in told for position in part]
    assert positions == list(range(4, 4 + len(positions)))
    now = await info(server, session)
    assert now.dropped_token_count == now.history_length - 20
    assert now.dropped_token_count - len(positions) == 1  # the token just sampled; told before the next one


async def test_a_turn_is_append_and_generate_in_one(server: Server) -> None:
    one, two = await create(server, [1, 2]), await create(server, [1, 2])
    options = pb.SamplingOptions(temperature=0)
    call = server.stub.Turn(pb.TurnRequest(session_id=one, token_ids=[3, 4], max_tokens=6, sampling=options))
    events = [event async for event in call]
    assert events[-1].done.prefill_tokens == 3  # the pending token and the two new ones
    await server.stub.AppendTokens(pb.AppendTokensRequest(session_id=two, token_ids=[3, 4]))
    tokens = [event.token.token_id for event in events[:-1]]
    assert tokens == await tokens_of(generate(server, two, 6))
    assert await history(server, one) == await history(server, two) == [1, 2, 3, 4, *tokens]


async def test_append_is_safe_to_retry(server: Server) -> None:
    session = await create(server)
    request = pb.AppendTokensRequest(session_id=session, token_ids=[1, 2, 3], expected_history_length=0)
    response = await server.stub.AppendTokens(request)
    assert (response.history_length, response.prefilled_tokens) == (3, 2)
    async with refused(grpc.StatusCode.ABORTED, "history_conflict", history_length="3"):
        await server.stub.AppendTokens(request)
    async with refused(grpc.StatusCode.ABORTED, "history_conflict", history_length="3"):
        await server.stub.Generate(
            pb.GenerateRequest(session_id=session, max_tokens=1, expected_history_length=9)
        ).read()
    assert await history(server, session) == [1, 2, 3]


async def test_bad_requests_change_nothing(server: Server) -> None:
    session = await create(server, [1, 2])
    empty = await create(server)
    bad = grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument"
    append, turn = server.stub.AppendTokens, server.stub.Turn
    for request in ([VOCABULARY], [-1], [], [1, 2**31 - 1]):
        async with refused(*bad):
            await append(pb.AppendTokensRequest(session_id=session, token_ids=request))
        async with refused(*bad):
            await turn(pb.TurnRequest(session_id=session, token_ids=request, max_tokens=1)).read()
    for sampling in (
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"top_logprobs": 21},
        {"stop_token_ids": [VOCABULARY]},
        {"logit_bias": {VOCABULARY: 1.0}},
    ):
        async with refused(*bad):
            await generate(server, session, 1, **sampling).read()
    for max_tokens in (0, -1):
        async with refused(*bad):
            await generate(server, session, max_tokens).read()
    async with refused(*bad):
        await generate(server, empty).read()
    for length in (-1, 3):
        async with refused(*bad):
            await server.stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=length))
        async with refused(*bad):
            await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session, at_position=length))
    for start, end in ((-1, 1), (1, 3), (2, 1)):
        async with refused(*bad):
            request = pb.GetHistoryRequest(session_id=session, from_position=start, to_position=end)
            await server.stub.GetHistory(request).read()
    for fields in ({"pin_tokens": 5}, {"pin_tokens": -1}, {"eos_token_ids": [99]}, {"tokens": [99]}):
        async with refused(*bad):
            await create(server, **fields)
    for request in ({"page_size": 1001}, {"page_size": -1}, {"page_token": "x"}, {"state": 77}, {"page_token": "²"}):
        async with refused(*bad):
            await server.stub.ListSessions(pb.ListSessionsRequest(**request))
    assert await history(server, session) == [1, 2]
    assert server.worker.num_free_slabs == 2
    assert len((await server.stub.ListSessions(pb.ListSessionsRequest())).sessions) == 2


async def test_closing_in_mid_stream_cancels_and_later_calls_say_closed(server: Server) -> None:
    session = await create(server, [1, 2])
    call = generate(server, session, 100_000)
    await call.read()
    closed = await server.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
    events = await events_of(call)
    assert events[-1].done.stop_reason == pb.STOP_REASON_CANCELLED
    assert events[-1].done.history_length == closed.final_history_length
    gone = grpc.StatusCode.NOT_FOUND, "session_not_found"
    async with refused(*gone, detail="closed"):
        await info(server, session)
    async with refused(*gone, detail="closed"):
        await server.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
    async with refused(*gone, detail="unknown"):
        await info(server, "0" * 32)
    assert server.worker.num_free_slabs == 4


async def test_idle_sessions_expire(server: Server) -> None:
    async with serving(SlowEngine(), idle_ttl_s=1) as short:
        busy = await create(short, [1])
        call = generate(short, busy, 100_000)
        await call.read()
        idle = await create(short, [1])
        await until(lambda: short.metrics.registry.get_sample_value("holdfast_session_active") == 1)
        async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="expired"):
            await info(short, idle)
        assert (await info(short, busy)).busy
        call.cancel()


async def test_forks_and_rewinds_over_the_wire(server: Server) -> None:
    session = await create(server, [1, 2, 3], client_label="root", metadata={"k": "v"})
    tokens = await tokens_of(generate(server, session, 4))
    fork = await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session, at_position=3))
    assert fork.history_length == 3
    assert await tokens_of(generate(server, fork.session_id, 4)) == tokens
    rewound = await server.stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=5))
    assert (rewound.history_length, rewound.recomputed_tokens) == (5, 0)
    assert await tokens_of(generate(server, session, 2)) == tokens[2:]
    copied = await info(server, fork.session_id)
    assert (copied.client_label, dict(copied.metadata)) == ("root", {"k": "v"})
    assert (copied.spans.given_tokens, copied.spans.sampled_tokens) == (3, 4)
    whole = await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session, client_label="copy"))
    assert await history(server, whole.session_id) == await history(server, session)


async def test_sessions_are_listed_by_page_label_and_state(server: Server) -> None:
    ids = [await create(server, client_label=label) for label in ("a", "b", "a", "a")]
    found, token = [], ""
    while True:
        request = pb.ListSessionsRequest(page_size=2, page_token=token, client_label="a")
        page = await server.stub.ListSessions(request)
        found += [session.session_id for session in page.sessions]
        token = page.next_page_token
        if not token:
            break
    assert found == [ids[0], ids[2], ids[3]]
    for state, num in ((pb.SESSION_STATE_LIVE, 4), (pb.SESSION_STATE_FAILED, 0)):
        assert len((await server.stub.ListSessions(pb.ListSessionsRequest(state=state))).sessions) == num


async def test_a_deadline_stops_the_engine_and_keeps_what_was_streamed(server: Server) -> None:
    session = await create(server, [1])
    options = pb.SamplingOptions(temperature=0)
    call = server.stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=100_000, sampling=options), timeout=2)
    streamed: list[int] = []

    async def read_all() -> None:
        async for event in call:
            streamed.extend([event.token.token_id] if event.HasField("token") else [])

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(streamed) > 10
    await eventually(lambda: info(server, session), lambda view: not view.busy)
    assert (await history(server, session))[1 : 1 + len(streamed)] == streamed


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("# team keys\nann: secret-a\n\n  bob:secret-b\n  # eve:old\n", encoding="utf-8-sig")
    return str(path)


async def test_keys_and_owners(keys_file: str) -> None:
    async with serving(SlowEngine(), keys_file=keys_file) as server:

        async def call_as(key: str, session: str) -> Any:
            return await server.stub.GetSessionInfo(
                pb.GetSessionInfoRequest(session_id=session), metadata=[("authorization", key)]
            )

        ann = [("authorization", "Bearer secret-a")]
        session = (await server.stub.CreateSession(pb.CreateSessionRequest(), metadata=ann)).session_id
        assert (await call_as("Bearer secret-a", session)).session_id == session
        async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="unknown"):
            await call_as("Bearer secret-b", session)
        for wrong in ("Bearer nope", "Bearer ", "secret-a", "Basic secret-a"):
            async with refused(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"):
                await call_as(wrong, session)
        async with refused(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"):
            await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        bob = [("authorization", "Bearer secret-b")]
        assert not (await server.stub.ListSessions(pb.ListSessionsRequest(), metadata=bob)).sessions
        await server.stub.CloseSession(pb.CloseSessionRequest(session_id=session), metadata=ann)
        async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="unknown"):
            await call_as("Bearer secret-b", session)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    chain, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    return chain, key


async def test_tls_on_both_doors(keys_file: str, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    files = {"tls_cert": str(chain), "tls_key": str(key), "keys_file": keys_file}
    async with serving(SlowEngine(), connection_timeout_s=0.5, **files) as server:
        credentials = grpc.ssl_channel_credentials(chain.read_bytes())
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
            async with refused(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"):
                await stub.GetModelInfo(pb.GetModelInfoRequest())
            ann = [("authorization", "Bearer secret-a")]
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=ann)
            assert info.vocabulary_size == VOCABULARY
        with pytest.raises(grpc.aio.AioRpcError):  # plain text is not understood
            await server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
        idle, writer = await asyncio.open_connection(*server.http.rsplit(":", 1))  # without a handshake
        assert await asyncio.wait_for(idle.read(), 20) == b""
        writer.close()
        trusted = ssl.create_default_context(cafile=str(chain))
        async with httpx.AsyncClient(base_url=f"https://{server.http}", verify=trusted) as client:
            assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "example.org:0"])
async def test_other_addresses_than_loopback_need_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="without API keys"):
        async with serving(SlowEngine(), grpc=address):
            pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"grpc": "nonsense"}, "not HOST:PORT"),
        ({"grpc": "127.0.0.1:99999"}, "not HOST:PORT"),
        ({"grpc": "::1:50051"}, "brackets"),
        ({"grpc": ":50051"}, "not HOST:PORT"),
        ({"grpc": "127.0.0.1:²"}, "not HOST:PORT"),
        ({"tls_cert": __file__, "tls_key": __file__}, "are not a certificate and its private key"),
        ({"tls_cert": "only.pem"}, "--tls-cert and --tls-key must be given together"),
        ({"tls_cert": "none.pem", "tls_key": "none.pem"}, r"cannot read none\.pem"),
        ({"keys_file": "/no/such/file"}, "cannot read the keys file"),
    ],
)
async def test_settings_that_cannot_be_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with serving(SlowEngine(), http="", **options):
            pass


async def test_a_port_that_is_taken_is_refused(server: Server) -> None:
    for door in ("grpc", "http"):
        taken = server.address if door == "grpc" else server.http
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}"):
            async with serving(SlowEngine(), **{door: taken}):
                pass


@pytest.mark.parametrize("text", ["no colon", "ann:", ":key", "ann:x\nbob:x", "  # ann:old", "ann:two words"])
async def test_a_wrong_keys_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not OWNER:KEY|repeats a key|contains no keys"):
        async with serving(SlowEngine(), keys_file=str(path)):
            pass


async def test_metrics_and_health_over_http(server: Server) -> None:
    session = await create(server, [1] * 5)
    await tokens_of(generate(server, session, 7))
    async with httpx.AsyncClient(base_url=f"http://{server.http}") as client:
        text = (await client.get("/metrics")).text
        for line in (
            "holdfast_session_active 1.0",
            "holdfast_generated_tokens_total 7.0",
            "holdfast_session_history_tokens 12.0",
            'holdfast_session_total{outcome="created"} 1.0',
            'holdfast_grpc_requests_total{code="OK",method="Generate"} 1.0',
            "holdfast_time_to_first_token_seconds_count 1.0",
            "holdfast_generate_prefill_tokens_sum 1.0",
        ):
            assert line in text
        assert f"holdfast_session_kv_live_bytes {float(11 * 8)}" in text
        assert (await client.get("/healthz")).json()["status"] == "ok"
        assert (await client.get("/readyz")).status_code == 200


async def test_a_sick_model_fails_one_session_and_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy, sick = await create(server, [1]), await create(server, [2])
    monkeypatch.setattr(engine_of(server), "_logits", lambda seen: np.full(VOCABULARY, np.nan, np.float32))
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "session_failed"):
        await generate(server, sick).read()
    monkeypatch.undo()
    failed = await info(server, sick)
    assert failed.state == pb.SESSION_STATE_FAILED
    assert "not finite" in failed.failure
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "session_failed"):
        await generate(server, sick).read()
    assert len(await tokens_of(generate(server, healthy))) == 5


async def test_a_history_that_disagrees_with_the_cache_fails_loudly(server: Server) -> None:
    session = await create(server, [1, 2])
    await server.worker.append(1, [9])  # behind the session's back
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "session_failed"):
        await tokens_of(generate(server, session))
    found = await info(server, session)
    assert (found.state, found.inv1_violations) == (pb.SESSION_STATE_FAILED, 1)
    assert 'violations_total{kind="inv1"} 1.0' in await _metrics(server)


async def _metrics(server: Server) -> str:
    async with httpx.AsyncClient(base_url=f"http://{server.http}") as client:
        return (await client.get("/metrics")).text


async def test_an_error_of_our_own_is_internal_and_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.serving.grpc.convert.model_info", lambda model: 1 / 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError" in caplog.text


# Client streaming is left out: ImportSession has no session to harm yet.
METHODS = [m for m in pb.DESCRIPTOR.services_by_name["RuntimeService"].methods_by_name if m != "ImportSession"]


async def test_ten_thousand_random_requests_never_break_the_server() -> None:
    """Bytes that are no message, messages with wild values, in any order, over a real channel."""
    source = random.Random(20)
    allowed = {"OK", "NOT_FOUND", "ABORTED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
    seen: dict[str, int] = {}
    async with serving(SlowEngine(num_slabs=8, forward_s=0)) as server:
        sessions = [await create(server, [1, 2, 3])]

        async def one() -> None:
            method = source.choice(METHODS)
            descriptor = pb.DESCRIPTOR.services_by_name["RuntimeService"].methods_by_name[method]
            data = (
                _wild_message(source, descriptor.input_type, sessions)
                if source.random() < 0.8
                else source.randbytes(40)
            )
            call = server.channel.unary_stream(f"/{SERVICE}/{method}")(data, timeout=20)
            try:
                async for raw in call:
                    if method == "CreateSession" and len(sessions) < 30:
                        sessions.append(pb.CreateSessionResponse.FromString(raw).session_id)
                code = "OK"
            except grpc.aio.AioRpcError as exc:
                code = exc.code().name
            seen[code] = seen.get(code, 0) + 1

        for _ in range(500):
            await asyncio.gather(*(one() for _ in range(20)))
        assert set(seen) <= allowed, seen
        assert len(seen) >= 4
        fresh = await create(server, [1, 2])
        assert len(await tokens_of(generate(server, fresh, 5))) == 5
    assert server.worker.num_free_slabs == 8


def _wild_message(source: random.Random, kind: Any, sessions: list[str]) -> bytes:
    message = getattr(pb, kind.name)()
    for field in kind.fields:
        if source.random() < 0.35:
            continue
        if field.name == "session_id":
            message.session_id = source.choice([*sessions[-6:], "", "x" * 50, "é"])
        elif field.name == "max_tokens":
            message.max_tokens = source.choice([-1, 0, 1, 3, 9])
        elif field.name == "token_ids":
            message.token_ids.extend(
                source.choice([1, 2, 63, 64, -5, 2**31 - 1, 7]) for _ in range(source.randint(0, 3))
            )
        elif field.name == "sampling":
            message.sampling.temperature = source.choice([0, 0.5, -1, float("nan"), float("inf"), 1e-9])
            message.sampling.top_p = source.choice([0.5, 1, 0, 2, float("nan")])
            message.sampling.top_k = source.choice([0, 5, -1, 2**31 - 1])
            message.sampling.seed = source.choice([0, 2**64 - 1])
        elif field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, source.choice(["", "a", "²" * 9]))
        elif field.type in (field.TYPE_INT32, field.TYPE_INT64) and not field.is_repeated:
            setattr(message, field.name, source.choice([0, 1, 2, 3, 5, -1, 2**31 - 1, 100]))
    data = message.SerializeToString()
    return data[: source.randint(0, len(data))] if source.random() < 0.1 else data


# What strangers send


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


async def test_metadata_that_is_not_utf_8_is_refused_and_not_logged(
    keys_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(SlowEngine(), keys_file=keys_file) as server:
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", f"/{SERVICE}/GetModelInfo".encode()),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"authorization", b"Bearer s\xe9cret-a"),
        ]
        block = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in headers)
        reader, writer = await asyncio.open_connection(*server.address.rsplit(":", 1))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        writer.write(_frame(1, 4, 1, block) + _frame(0, 1, 1, bytes(5)))
        answer = b""
        while b"grpc-message" not in answer:
            answer += await asyncio.wait_for(reader.read(4096), 20)
        assert b"grpc-status\x0216" in answer  # UNAUTHENTICATED
        writer.close()
    assert "cret" not in caplog.text


async def test_several_authorization_headers_are_refused(keys_file: str) -> None:
    async with serving(SlowEngine(), keys_file=keys_file) as server:
        keys = [("authorization", "Bearer secret-a"), ("authorization", "Bearer secret-b")]
        for metadata in (keys, keys[::-1], [keys[0], keys[0]]):
            async with refused(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"):
                await server.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)


async def test_an_api_key_may_come_as_x_api_key(keys_file: str) -> None:
    async with serving(SlowEngine(), keys_file=keys_file) as server:
        await server.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=[("x-api-key", "secret-a")])
        for other in ("secret-b", "wrong"):
            metadata = [("x-api-key", other), ("authorization", "Bearer secret-a")]
            async with refused(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"):
                await server.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)


TOO_LARGE: dict[str, dict[str, Any]] = {
    "client_label": {"client_label": "x" * 1001},
    "eos_token_ids": {"eos_token_ids": [1] * 4097},
    "metadata": {"metadata": {str(number): "" for number in range(65)}},
    "metadata.a": {"metadata": {"a": "x" * 4097}},
}


@pytest.mark.parametrize("field", TOO_LARGE)
async def test_lists_and_labels_without_measure_are_refused_by_name(server: Server, field: str) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument", param=field):
        await server.stub.CreateSession(pb.CreateSessionRequest(**TOO_LARGE[field]))
    session = await create(server, [1])
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument", param="client_label"):
        await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session, client_label="x" * 1001))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument", param="stop_token_ids"):
        options = pb.SamplingOptions(stop_token_ids=[1] * 4097)
        await server.stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=1, sampling=options)).read()


async def test_a_message_beyond_the_limit_of_its_method_is_refused_before_it_is_decoded(server: Server) -> None:
    text = "x" * (1 << 20)
    for call in (
        server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=text)),
        server.stub.ListSessions(pb.ListSessionsRequest(page_token=text)),
        server.stub.CreateSession(pb.CreateSessionRequest(client_label=text * 16)),
    ):
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "payload_too_large"):
            await call
    assert await create(server, [1])


async def test_an_error_never_repeats_more_of_a_request_than_fits_into_trailers(server: Server) -> None:
    async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found"):
        await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id="x" * 1_000_000))


async def test_tokens_of_a_batch_are_one_message_where_the_client_wants_that(server: Server) -> None:
    found: list[list[int]] = []
    for batch_tokens in (True, False):
        request = pb.GenerateRequest(session_id=await create(server, [1]), max_tokens=20, batch_tokens=batch_tokens)
        request.sampling.seed = 1
        *sent, _ = [event async for event in server.stub.Generate(request)]
        assert {event.WhichOneof("event") for event in sent} == {"tokens" if batch_tokens else "token", "truncated"}
        found.append([token.token_id for event in sent for token in [*event.tokens.tokens, event.token]])
    assert [token for token in found[0] if token] == [token for token in found[1] if token]


def test_other_events_between_tokens_keep_their_place() -> None:
    tokens = [Sampled(token=id, logprob=-1.0, sampling_logprob=-2.0) for id in range(3)]
    values = [*tokens[:2], Truncated(4, 5), tokens[2]]
    batched = list(convert.events(values, batch_tokens=True))
    assert [[token.token_id for token in event.tokens.tokens] for event in batched] == [[0, 1], [], [2]]
    assert [event.WhichOneof("event") for event in batched] == ["tokens", "truncated", "tokens"]
    single = list(convert.events(values, batch_tokens=False))
    assert [event.WhichOneof("event") for event in single] == ["token", "token", "truncated", "token"]
    assert batched[0].tokens.tokens[1] == single[1].token
