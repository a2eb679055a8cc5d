"""What an upstream server says before it is used: which model it serves, with which tokenizer and kind of logprobs."""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.backends.servers import Server
from holdfast.backends.transport import accepted, refusal
from holdfast.backends.validation import decoded
from holdfast.errors import ConfigError, InvalidArgument, UpstreamInvalid
from holdfast.sessions.ports import LogprobKind, UpstreamReply

if TYPE_CHECKING:
    from holdfast.backends.upstream import UpstreamBackend

PROBE = "holdfast-probe"  # in the place of a session's id
SAMPLE_TEXT = 'The year 1984, isn\'t it?  Ünïcode: 漢字, مرحبا, 🙂\n\tdef f(x): return {"a": x ** 2}\n'

_TEMPERATURE = 0.5
_SMALLEST_GAP = 0.05  # two logprobs that are closer than this show nothing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    model: str
    context: int | None
    logprob_kind: LogprobKind


async def probe(backend: "UpstreamBackend", server: Server | None = None) -> ProbeReport:
    """What the server says; the backend keeps the model's name, its context and the kind of its logprobs.

    Raises UpstreamError if the server does not do what we rely on or serves another model than before, ConfigError if
    it contradicts a setting.
    """
    server = server or backend.servers.all[0]
    cards = decoded(accepted(await server.transport.request("GET", "/v1/models")), _CARDS).data
    if not cards:
        raise UpstreamInvalid("the upstream serves no model")
    card = next((card for card in cards if card.id == backend.known_model), cards[0])
    backend.check_model(card.id)
    server.model = card.id
    if backend.sample:
        await check_tokenizer(server, backend.sample)
    vocab_size = backend.model.vocab_size
    prompt = [vocab_size // 7, vocab_size // 5, vocab_size // 3]
    reply = None
    if backend.config.upstream_api == "chat":
        reply = await _one_reply(backend, server, prompt)
    else:
        await backend.one_token(server, prompt)
    kind = await _found_kind(backend, server, prompt)
    found = ProbeReport(card.id, card.max_model_len, kind)
    backend.adopt(found)
    if reply is not None:
        backend.learn_row_shapes(reply)
    return replace(found, logprob_kind=backend.logprob_kind)


async def _one_reply(backend: "UpstreamBackend", server: Server, prompt: list[int]) -> UpstreamReply:
    """A reply of one token to `prompt`, checked as any other."""
    request = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1, "temperature": 1.0}
    reply = await backend.complete_on(server, request, prompt, session_id=PROBE)
    if reply.completion is None:
        raise refusal(reply.status, reply.received)
    return reply


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


_CARDS = msgspec.json.Decoder(_ModelCards)


async def _found_kind(backend: "UpstreamBackend", server: Server, prompt: list[int]) -> LogprobKind:
    """Temperature stretches the gap between two logprobs, unless they are taken before it is applied."""
    try:
        gap, stretched_gap = [await _gap(backend, server, prompt, t) for t in (1.0, _TEMPERATURE)]
    except (UpstreamInvalid, InvalidArgument) as exc:
        logger.warning("cannot determine which logprobs the upstream returns: %s", exc)
        return LogprobKind.UNKNOWN
    stretched = stretched_gap / gap if gap > _SMALLEST_GAP else 0.0
    if abs(stretched - 1) < 0.2:
        return LogprobKind.RAW
    if abs(stretched * _TEMPERATURE - 1) < 0.2:
        return LogprobKind.SAMPLING
    return LogprobKind.UNKNOWN


async def _gap(backend: "UpstreamBackend", server: Server, prompt: list[int], temperature: float) -> float:
    best = await backend.best_logprobs(server, prompt, temperature)
    if len(best) < 2:
        raise UpstreamInvalid("the upstream did not return the two logprobs that were requested")
    return best[0] - best[1]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A text, and its tokens by the tokenizer of the model `name`."""

    name: str
    text: str
    ids: tuple[int, ...]


class _Tokens(msgspec.Struct):
    tokens: list[int]


_TOKENS = msgspec.json.Decoder(_Tokens)


async def check_tokenizer(server: Server, sample: TokenSample) -> None:
    """Raises ConfigError if the upstream reads the sample in other tokens. One without `/tokenize` is not checked."""
    request = {"model": server.model, "prompt": sample.text, "add_special_tokens": False}
    answer = await server.transport.post("/tokenize", request, {})
    if answer.status != 200:
        return
    try:
        tokens = decoded(answer.body, _TOKENS).tokens
    except UpstreamInvalid as exc:
        logger.warning("cannot compare the upstream's tokenizer with that of %s: %s", sample.name, exc)
        return
    if tuple(tokens) != sample.ids:
        raise ConfigError(
            f"the upstream serves {server.model!r}, whose tokenizer is not that of {sample.name!r}: it reads "
            f"{sample.text[:18]!r}... as {tokens[:6]}, and this model as {list(sample.ids[:6])}; pass the model that "
            "the upstream serves"
        )
