"""Whether an upstream has the tokenizer of the model that this server was given: both must read the same text alike."""

import logging
from dataclasses import dataclass

import msgspec

from holdfast.backends.transport import Transport
from holdfast.backends.validation import decoded
from holdfast.errors import ConfigError, UpstreamInvalid

SAMPLE_TEXT = 'The year 1984, isn\'t it?  Ünïcode: 漢字, مرحبا, 🙂\n\tdef f(x): return {"a": x ** 2}\n'

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A text, and its tokens by the tokenizer of the model `name`."""

    name: str
    text: str
    ids: tuple[int, ...]


class _Tokens(msgspec.Struct):
    tokens: list[int]


_TOKENS = msgspec.json.Decoder(_Tokens)


async def check_tokenizer(transport: Transport, upstream_model: str, sample: TokenSample) -> None:
    """Raises ConfigError if the upstream reads the sample in other tokens. One without `/tokenize` is not checked."""
    request = {"model": upstream_model, "prompt": sample.text, "add_special_tokens": False}
    answer = await transport.post("/tokenize", request, {})
    if answer.status != 200:
        return
    try:
        tokens = decoded(answer.body, _TOKENS).tokens
    except UpstreamInvalid as exc:
        logger.warning("cannot compare the upstream's tokenizer with that of %s: %s", sample.name, exc)
        return
    if tuple(tokens) != sample.ids:
        raise ConfigError(
            f"the upstream serves {upstream_model!r}, whose tokenizer is not that of {sample.name!r}: it reads "
            f"{sample.text[:18]!r}... as {tokens[:6]}, and this model as {list(sample.ids[:6])}; pass the model that "
            "the upstream serves"
        )
