"""A generation of the fake server: tokens into the session's history, and what its window drops on the way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fake_model import next_token, visible
from fake_session import RECENT, FakeSession, Span
from holdfast_sdk.gen import runtime_pb2 as pb

PAIRED = 4242  # a seed whose tokens come two at a time, where the client takes batches


async def sample(session: FakeSession, request: Any, on_leave: Callable[[], None]) -> AsyncIterator[pb.GenerateEvent]:
    """The events of one generation; `on_leave` is called where nobody waits for its end."""
    sampling = request.sampling
    seed = sampling.seed if sampling.HasField("seed") else 7
    span = Span(pb.SPAN_KIND_SAMPLED, len(session.tokens))
    session.spans.append(span)
    session.busy = True
    try:
        while span.stop_reason == pb.STOP_REASON_UNSPECIFIED:
            start = max(session.reported, session.sink)
            if start < session.dropped_end and (not span.tokens or start == session.sink):
                session.reported = session.dropped_end
                truncated = pb.HistoryTruncated(from_position=start, to_position=session.dropped_end)
                yield pb.GenerateEvent(truncated=truncated)
            token = next_token(visible(session.tokens, session.sink, RECENT), sampling, seed)
            session.tokens.append(token.token_id)
            span.tokens.append(token)
            if request.batch_tokens and seed == PAIRED:
                if len(span.tokens) % 2 == 0:
                    yield pb.GenerateEvent(tokens=pb.TokenBatch(tokens=span.tokens[-2:]))
            else:
                yield pb.GenerateEvent(token=token)
            await asyncio.sleep(0)
            if token.token_id in session.eos:
                span.stop_reason = pb.STOP_REASON_EOS
            elif token.token_id in sampling.stop_token_ids:
                span.stop_reason = pb.STOP_REASON_STOP_TOKEN
            elif len(span.tokens) >= request.max_tokens:
                span.stop_reason = pb.STOP_REASON_MAX_TOKENS
    except (asyncio.CancelledError, GeneratorExit):
        span.stop_reason = pb.STOP_REASON_CANCELLED
        on_leave()
        raise
    finally:
        session.busy = False
    done = pb.Done(
        stop_reason=span.stop_reason,
        generated_token_count=len(span.tokens),
        prefill_tokens=1,
        prefill_duration_seconds=0.25,
        total_duration_seconds=0.5,
        dropped_token_count=session.dropped_end - session.sink,
        seed=seed,
        history_length=len(session.tokens),
    )
    yield pb.GenerateEvent(done=done)
