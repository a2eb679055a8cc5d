"""Samples of a session of raw tokens, as gRPC clients have them: its spans know what was sampled."""

from collections.abc import Iterable

from holdfast.chats.samples.assembly import Detokenize, assemble
from holdfast.chats.samples.options import Options, SessionFacts
from holdfast.chats.samples.sample import Export
from holdfast.chats.tree import Tree
from holdfast.generation import Sampled, StopReason
from holdfast.sessions.history import SpanKind, SpanPiece
from holdfast.sessions.record import TemplateInputs, TurnFacts

_FINISH = {
    StopReason.MAX_TOKENS: "length",
    StopReason.EOS: "stop",
    StopReason.STOP_TOKEN: "stop",
    StopReason.CANCELLED: "cancelled",
    None: "",  # rewound into, or never finished: nothing is claimed
}


def from_spans(
    pieces: Iterable[SpanPiece],
    options: Options | None = None,
    session: SessionFacts | None = None,
    *,
    facts: TurnFacts | None = None,
    detokenize: Detokenize | None = None,
) -> Export:
    """The one sample of a session of raw tokens, up to its last sampled token. `facts` hold for every turn.

    A span that came in several pieces is one turn; the last piece has its stop reason.
    """
    tree = Tree()
    given: list[int] = []
    sampled: list[Sampled] = []

    def end_turn(stop_reason: StopReason | None) -> None:
        if sampled:
            tree.attach(
                tree.tip,
                messages=(),
                reply={"role": "assistant", "content": ""},
                root=TemplateInputs(),
                given=given,
                sampled=sampled,
                finish_reason=_FINISH[stop_reason],
                facts=facts or TurnFacts(logprob_kind="raw"),
            )
            given.clear()
            sampled.clear()

    for piece in pieces:
        if piece.kind is SpanKind.GIVEN:
            end_turn(None)
            given.extend(piece.tokens)
            continue
        for token, logprob, sampling in zip(piece.tokens, piece.logprobs, piece.sampling_logprobs, strict=True):
            sampled.append(Sampled(token=token, logprob=logprob, sampling_logprob=sampling))
        if piece.stop_reason is not None:
            end_turn(piece.stop_reason)
    end_turn(None)
    return assemble(tree, options, session, detokenize=detokenize)
