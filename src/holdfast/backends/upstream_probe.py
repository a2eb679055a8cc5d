"""What an upstream is asked once, at start-up: who it is, whether it takes our token ids, which logprobs it tells."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from holdfast.backends.refusal import refusal
from holdfast.backends.validation import decoded
from holdfast.errors import ConfigError, InvalidArgument, UpstreamInvalid
from holdfast.sessions.ports import LogprobKind

if TYPE_CHECKING:
    from holdfast.backends.upstream import UpstreamBackend

logger = logging.getLogger(__name__)

_TEMPERATURE = 0.5
_SMALLEST_GAP = 0.05  # two logprobs that are closer than this tell nothing
_SESSION = "holdfast-probe"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    model: str
    context: int | None
    logprob_kind: LogprobKind


async def probe(backend: "UpstreamBackend") -> ProbeReport:
    """What was found; the backend remembers the model's name and the kind of its logprobs.

    Raises UpstreamError where the server does not do what we rely on, ConfigError where it contradicts a setting.
    """
    card = await _first_model(backend)
    backend.upstream_model = card.id
    vocab_size = backend.model.vocab_size
    prompt = [vocab_size // 7, vocab_size // 5, vocab_size // 3]
    request = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1, "temperature": 1.0}
    reply = await backend.complete(request, prompt, session_id=_SESSION)
    if reply.completion is None:
        raise refusal(reply.status, reply.received)
    num_read = reply.completion.prompt_tokens
    if num_read not in (None, len(prompt)):
        raise UpstreamInvalid(f"the upstream takes no token ids: {len(prompt)} were sent, it read {num_read}")
    backend.logprob_kind = _resolved(backend.config.logprob_kind, await _found_kind(backend, prompt))
    return ProbeReport(card.id, card.max_model_len, backend.logprob_kind)


class _Card(Struct):
    id: str
    max_model_len: int | None = None


class _Cards(Struct):
    data: list[_Card]


_CARDS = msgspec.json.Decoder(_Cards)


async def _first_model(backend: "UpstreamBackend") -> _Card:
    answer = await backend.transport.request("GET", "/v1/models")
    if answer.status != 200:
        raise refusal(answer.status, answer.body)
    cards = decoded(answer.body, _CARDS).data
    if not cards:
        raise UpstreamInvalid("the upstream serves no model")
    return cards[0]


async def _found_kind(backend: "UpstreamBackend", prompt: list[int]) -> LogprobKind:
    """A temperature stretches the gap between two logprobs, unless they were taken before it."""
    try:
        first, second = await backend.two_best(prompt, 1.0)
        gap = first - second
        first, second = await backend.two_best(prompt, _TEMPERATURE)
    except (UpstreamInvalid, InvalidArgument) as exc:
        logger.warning("cannot tell which logprobs the upstream returns: %s", exc)
        return LogprobKind.UNKNOWN
    stretched = (first - second) / gap if gap > _SMALLEST_GAP else 0.0
    if abs(stretched - 1) < 0.2:
        return LogprobKind.RAW
    if abs(stretched * _TEMPERATURE - 1) < 0.2:
        return LogprobKind.SAMPLING
    return LogprobKind.UNKNOWN


def _resolved(setting: str, found: LogprobKind) -> LogprobKind:
    if setting == "auto":
        return found
    stated = LogprobKind(setting)
    if LogprobKind.UNKNOWN not in (stated, found) and stated is not found:
        raise ConfigError(f"logprob_kind is {stated}, but the upstream was seen to tell {found} logprobs")
    return stated
