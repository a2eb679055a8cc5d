"""Samples from a tree of turns, or from the spans of a token session. Pure: the same input gives the same samples.

>>> from holdfast.sessions.record import TemplateInputs
>>> from holdfast.generation import Sampled
>>> from holdfast.chats.tree import Tree
>>> tree, reply = Tree(), {"role": "assistant", "content": "Hello"}
>>> sampled = [
...     Sampled(token=7, logprob=-0.5, sampling_logprob=-0.25),
...     Sampled(token=2, logprob=-2.0, sampling_logprob=-1.0),
... ]
>>> node = tree.attach(
...     tree.root,
...     messages=[],
...     reply=reply,
...     root=TemplateInputs(),
...     given=[1, 5, 6],
...     sampled=sampled,
...     finish_reason="stop",
... )
>>> (sample,) = assemble(tree, session=SessionFacts(group="greetings", reward=1.0)).samples
>>> sample.tokens.tolist(), sample.loss_mask.tolist(), sample.rollout_log_probs.tolist()
([1, 5, 6, 7, 2], [1, 1], [-0.25, -1.0])
>>> sample.status.value, sample.reward, sample.logprob_kind
('completed', 1.0, 'sampling')
"""

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from holdfast.chats.samples.certificate import certify
from holdfast.chats.samples.loss_mask import Kept, branches, cut, loss_mask, masked, parts, response_start
from holdfast.chats.samples.payloads import ResponseOf, no_response, rows_of
from holdfast.chats.samples.sample import EmptyReason, Export, Logprobs, Sample, Status, TurnSpan, totals
from holdfast.chats.tree import Node, Tree
from holdfast.errors import InvalidArgument, SamplesUnusable
from holdfast.generation import Sampled, StopReason, weight_spans
from holdfast.sessions.history import SpanKind, SpanPiece
from holdfast.sessions.record import Recalled, TemplateInputs, TurnFacts, View

Detokenize = Callable[[list[int]], str]
_STATUS = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "cancelled": Status.ABORTED, "": Status.ABORTED}
_FINISH = {
    StopReason.MAX_TOKENS: "length",
    StopReason.EOS: "stop",
    StopReason.STOP_TOKEN: "stop",
    StopReason.CANCELLED: "cancelled",
    None: "",  # rewound into, or never finished: nothing is claimed
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a trainer asks for. `num_layers` gives routed experts their shape where the upstream sends them flat.
    `weight_versions`: files tell them as names, or as spans of tokens."""

    branch: str = "tip"
    max_seq_len: int | None = None
    min_weight_version: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # goes over the session's own
    num_layers: int | None = None
    weight_versions: str = "names"

    def __post_init__(self) -> None:
        for name, choices in (("branch", ("tip", "all")), ("weight_versions", ("names", "spans"))):
            if (value := getattr(self, name)) not in choices:
                raise InvalidArgument(f"{name} must be {' or '.join(choices)}, got {value!r}", param=name)
        for name, lowest in (("max_seq_len", 1), ("min_weight_version", 0), ("num_layers", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < lowest):
                raise InvalidArgument(f"{name} must be an integer of at least {lowest}, got {value!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """What a session adds to each of its samples. `summary` becomes the export's `session_metadata`."""

    session_id: str = ""
    group: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None  # for the whole session; without it, a sample's is the sum of its turns'
    summary: Mapping[str, Any] = field(default_factory=dict)
    is_forest: bool = False  # its samples say where in the forest they come from
    expert_shape: tuple[int, int] | None = None  # layers and experts per token, of routed experts that came flat


def assemble(
    tree: Tree,
    options: Options | None = None,
    session: SessionFacts | None = None,
    *,
    detokenize: Detokenize | None = None,
    response_of: ResponseOf = no_response,
) -> Export:
    """The samples of a tree's tip, or of all its branches, each with its certificate. A branch of which an upstream got
    one view after the other is one sample for each: the given tokens of its first turn are the whole prompt.

    `detokenize` makes the text of each response, `response_of` has its bytes, in which heavy payloads lie. Raises
    SamplesUnusable where the record itself stands in the way.
    """
    options, session = options or Options(), session or SessionFacts()
    paths = branches(tree) if options.branch == "all" else [tree.tip.path()]
    summary = _plain(session.summary, "session_metadata")
    seen: set[int] = set()
    samples = []
    for part in (part for path in paths for part in parts(path)):
        kept = cut(part, options.max_seq_len)
        if kept is None or kept.nodes[-1].number in seen:  # cut down to what an earlier branch has
            continue
        turns = _turns(kept, seen, options.min_weight_version)
        seen |= {node.number for node in kept.nodes}
        left_out = len(part) - len(kept.nodes)
        samples.append(
            _sample(
                kept,
                turns,
                num_left_out=left_out,
                options=options,
                session=session,
                detokenize=detokenize,
                response_of=response_of,
            )
        )
    if samples:
        has_spans = options.weight_versions == "spans"
        return Export(samples=tuple(samples), session_metadata=summary, has_version_spans=has_spans)
    was_sampled = any(node.turn.sampled for path in paths for node in path)
    reason = EmptyReason.ALL_TRUNCATED if was_sampled else EmptyReason.NO_RECORDS
    return Export(session_metadata=summary, empty_reason=reason)


def _turns(kept: Kept, seen: set[int], min_weight_version: int | None) -> tuple[TurnSpan, ...]:
    turns: list[TurnSpan] = []
    for node, after in zip_longest(kept.nodes, kept.nodes[1:]):
        is_cut = kept.is_cut and after is None
        num_sampled = _num_sampled(node, after) if after else kept.last_sampled
        sampled_start = node.end - node.turn.num_lasting - kept.view.num_hidden
        turns.append(
            TurnSpan(
                number=node.number,
                start=turns[-1].end if turns else 0,
                sampled_start=sampled_start,
                end=sampled_start + num_sampled,
                finish_reason="length" if is_cut else node.turn.finish_reason,
                masked=masked(node, seen, min_weight_version),
                is_cut=is_cut,
                sampling=_plain(node.turn.facts.sampling, f"the sampling parameters of turn {node.number}"),
                logprob_kind=_logprobs(node)[1],
                weight_versions=node.turn.facts.weight_versions,
                reward=_reward(node.turn.reward),
                weight_spans=_first(node.turn.facts.weight_spans, num_sampled),
                effort=dict(node.turn.facts.effort),
                recalled=_recalled(node, kept.view),
            )
        )
    return tuple(turns)


def _recalled(node: Node, view: View) -> tuple[int, ...]:
    """Where in a sample the quotes among a turn's given tokens begin, and how many tokens they have."""
    recalled = node.turn.facts.recalled
    return (node.start + recalled.start - view.num_hidden, recalled.length) if recalled else ()


def _num_sampled(node: Node, after: Node) -> int:
    """How many of a turn's sampled tokens are in a sample that goes on with `after`. A trimmed end that is given there
    just so was sampled all the same."""
    turn = node.turn
    trimmed = turn.sampled[turn.num_lasting :]
    return len(turn.sampled) if after.turn.given[: len(trimmed)] == trimmed else turn.num_lasting


def _first(spans: tuple[tuple[str, int], ...], num: int) -> tuple[tuple[str, int], ...]:
    """The spans of the first `num` tokens."""
    kept = []
    for name, length in spans:
        if num > 0:
            kept.append((name, min(length, num)))
        num -= length
    return tuple(kept)


def _sample(
    kept: Kept,
    turns: tuple[TurnSpan, ...],
    *,
    num_left_out: int,
    options: Options,
    session: SessionFacts,
    detokenize: Detokenize | None,
    response_of: ResponseOf,
) -> Sample:
    nodes, num_tokens, start = kept.nodes, turns[-1].end, response_start(turns)
    tokens = np.array(kept.view.of(nodes[-1].ids_as_sampled()), np.int64)
    trained = [_logprobs(node)[0] if turn.num_trained else None for node, turn in zip(nodes, turns, strict=True)]
    has_both = all(_is_whole(node, node.turn.sampling_logprobs) for node in nodes)
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    is_truncated = kept.is_cut or num_left_out > 0
    sample = certify(
        Sample(
            session_id=session.session_id,
            branch=turns[-1].number,
            status=Status.TRUNCATED if is_truncated else _STATUS.get(turns[-1].finish_reason, Status.COMPLETED),
            num_left_out=num_left_out,
            turns=turns,
            tokens=tokens[:num_tokens],
            loss_mask=loss_mask(turns),
            rollout_log_probs=_spread(turns, trained),
            logprobs=_spread(turns, [node.turn.logprobs for node in nodes]),
            sampling_logprobs=_spread(turns, [node.turn.sampling_logprobs for node in nodes]) if has_both else None,
            rollout_routed_experts=rows_of(
                nodes, "routed_experts", num_tokens, shape=_expert_shape(options, session), response_of=response_of
            ),
            rollout_indexer_topk=rows_of(nodes, "indexer_topk", num_tokens, response_of=response_of),
            response=detokenize(tokens[start:num_tokens].tolist()) if detokenize else "",
            reward=_reward(session.reward) if session.reward is not None else math.fsum(rewards) if rewards else None,
            **_plain({"group": session.group, "label": session.label}, "group and label"),
        )
    )
    effort = totals(sample)
    own = _place(nodes, session) | ({"effort": effort} if effort else {}) | _seen(kept)
    named = {"holdfast": own} if own else {}
    return replace(sample, metadata=_plain({**session.metadata, **named, **options.metadata}, "metadata"))


def _expert_shape(options: Options, session: SessionFacts) -> tuple[int, int | None] | None:
    """Layers and experts per token, if that is known, of routed experts; what the trainer says comes first."""
    return (options.num_layers, None) if options.num_layers else session.expert_shape


def _place(nodes: Sequence[Node], session: SessionFacts) -> dict[str, Any]:
    """Where in a forest a branch is: the turn that its conversation begins with, for each turn the one above it, the
    turns whose requests had changed a sampled reply, and the ids that the client sent."""
    edited = [node.number for node in nodes if node.turn.facts.is_edited]
    if not (session.is_forest or edited):
        return {}
    agent = {name: value for node in nodes for name, value in node.turn.facts.agent.items()}
    parents = [node.turn.parent for node in nodes]
    return {"root": nodes[0].number, "parents": parents, "edited_turns": edited, "agent": agent}


def _seen(kept: Kept) -> dict[str, Any]:
    """What of the branch its prompts were made of, where that is not all; and where in the sample there are quotes of
    earlier passages: the turn, the first token, the number of tokens."""
    view = kept.view
    nodes = [node for node in kept.nodes[-1].path() if node.end > view.start]
    recalled = [(node.number, *_recalled(node, view)) for node in nodes if node.turn.facts.recalled]
    found: dict[str, Any] = {"view": {"pinned": view.pinned, "start": view.start}} if view.num_hidden else {}
    return found | ({"recalled": recalled} if recalled else {})


def _spread(turns: tuple[TurnSpan, ...], values: "Sequence[array[float] | None]") -> Logprobs:
    """Each turn's values on its sampled tokens, 0.0 elsewhere, from the first sampled token on."""
    spread = np.zeros(turns[-1].end, np.float64)
    for turn, numbers in zip(turns, values, strict=True):
        if numbers is not None:
            spread[turn.sampled_start : turn.end] = numbers[: turn.num_sampled]
    return spread[response_start(turns) :]


def _logprobs(node: Node) -> "tuple[array[float], str]":
    """Those of the distribution that was sampled from, where they are on record, and which kind they are.

    Where both series are the same numbers, only one was known, and the turn's facts say which.
    """
    turn = node.turn
    if not _is_whole(node, turn.logprobs):
        raise SamplesUnusable(
            f"turn {node.number} has no finite logprob for each of its {len(turn.sampled)} tokens", reason="logprobs"
        )
    kind = str(turn.facts.logprob_kind)
    has_both = turn.sampling_logprobs != turn.logprobs and _is_whole(node, turn.sampling_logprobs)
    return (turn.sampling_logprobs, "sampling") if kind != "sampling" and has_both else (turn.logprobs, kind)


def _is_whole(node: Node, logprobs: "array[float]") -> bool:
    return len(logprobs) == len(node.turn.sampled) and all(map(math.isfinite, logprobs))


def _reward(reward: float | None) -> float | None:
    if reward is not None and not math.isfinite(reward):
        raise SamplesUnusable("reward must be a finite number", reason="reward")
    return None if reward is None else float(reward)


def _plain(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """As JSON has it, so that every format gives the same back."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        return msgspec.json.decode(text, type=dict[str, Any])
    except (TypeError, ValueError, RecursionError) as exc:
        raise SamplesUnusable(f"{what}: not JSON: {exc}", reason="metadata") from exc


def _with_weights(facts: TurnFacts, sampled: Sequence[Sampled]) -> TurnFacts:
    """With the versions of the weights that sampled a turn, where they are on record."""
    spans = weight_spans(sampled)
    if not any(version for version, _ in spans):
        return facts
    return replace(facts, weight_versions=(spans[0][0], spans[-1][0]), weight_spans=spans if len(spans) > 1 else ())


def _with_quotes(facts: TurnFacts, places: Sequence[int]) -> TurnFacts:
    return replace(facts, recalled=Recalled(start=places[0], length=len(places))) if places else facts


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
    quotes: list[int] = []  # their places among the given
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
                facts=_with_weights(_with_quotes(facts or TurnFacts(logprob_kind="raw"), quotes), sampled),
            )
            given.clear()
            quotes.clear()
            sampled.clear()

    for piece in pieces:
        if piece.kind is not SpanKind.SAMPLED:
            end_turn(None)
            if piece.kind is SpanKind.RECALLED:
                if quotes and quotes[-1] + 1 < len(given):  # of a turn before, which has no reply
                    quotes.clear()
                quotes.extend(range(len(given), len(given) + len(piece.tokens)))
            given.extend(piece.tokens)
            continue
        for token, logprob, sampling in zip(piece.tokens, piece.logprobs, piece.sampling_logprobs, strict=True):
            version = piece.weight_version
            sampled.append(Sampled(token=token, logprob=logprob, sampling_logprob=sampling, weight_version=version))
        if piece.stop_reason is not None:
            end_turn(piece.stop_reason)
    end_turn(None)
    return assemble(tree, options, session, detokenize=detokenize)
