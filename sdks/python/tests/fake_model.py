"""A model without weights: the next token is a hash of what the window shows. Deterministic, and it obeys biases."""

import hashlib
import math
from collections.abc import Sequence

from holdfast_sdk.gen import runtime_pb2 as pb

VOCABULARY_SIZE = 49152
EOS = 2
STRONG_BIAS = 50.0
SPELLED = {
    198: "\n",
    504: "The",
    40061: " keeper",
    282: " of",
    260: " the",
    1420: " light",
    314: " is",
    1217: " called",
}
SPELLED |= {198: "\n", 14314: " Amb", 11381: "rose", 30: ".", 10576: "Who", 47: "?"}


def visible(tokens: Sequence[int], sink: int, recent: int) -> list[int]:
    return list(tokens) if len(tokens) <= sink + recent else [*tokens[:sink], *tokens[-recent:]]


def next_token(seen: Sequence[int], sampling: pb.SamplingOptions, seed: int) -> pb.Token:
    """Greedy draws ignore the seed, others are a function of it."""
    noise = 0 if sampling.temperature == 0 and sampling.HasField("temperature") else seed + 1
    forced = [token for token, bias in sampling.logit_bias.items() if bias >= STRONG_BIAS]
    banned = {token for token, bias in sampling.logit_bias.items() if bias <= -STRONG_BIAS}
    digest = hashlib.sha256(repr((list(seen), noise)).encode()).digest()
    drawn = int.from_bytes(digest[:4], "big") % VOCABULARY_SIZE
    while drawn in banned:
        drawn = (drawn + 1) % VOCABULARY_SIZE
    token = forced[0] if forced else drawn
    logprob = -math.log(VOCABULARY_SIZE)
    top = [pb.TokenLogprob(token_id=other, logprob=logprob) for other in range(sampling.top_logprobs)]
    return pb.Token(token_id=token, logprob=logprob, sampling_logprob=logprob, top=top)


def spelled(tokens: Sequence[int]) -> str:
    """The few words that it knows."""
    return "".join(SPELLED.get(token, "") for token in tokens)


def is_valid(max_tokens: int, sampling: pb.SamplingOptions) -> bool:
    return (
        max_tokens >= 1
        and sampling.temperature >= 0
        and (0 < sampling.top_p <= 1 or not sampling.HasField("top_p"))
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
        and (sampling.repetition_penalty > 0 or not sampling.HasField("repetition_penalty"))
        and 0 <= sampling.top_logprobs <= 20
        and all(0 <= token < VOCABULARY_SIZE for token in (*sampling.logit_bias, *sampling.stop_token_ids))
    )
