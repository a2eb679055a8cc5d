"""A token history in spans: runs of given tokens, quotes among them, and runs of sampled ones with their logprobs."""

import bisect
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast.generation import Done, Event, Sampled, StopReason
from holdfast.sessions.journal.base import Entry, HistoryRewound, Step, TokensGiven, TokensSampled
from holdfast.sessions.record import Recalled, TurnRecord


class SpanKind(StrEnum):
    GIVEN = "given"
    RECALLED = "recalled"  # given too: quotes of earlier passages
    SAMPLED = "sampled"


@dataclass(slots=True)
class Span:
    """Tokens from `start` on. A sampled span has two logprobs a token, and a stop reason once it ended. Where the
    weights change during a generation, a new span begins."""

    kind: SpanKind
    start: int
    length: int = 0
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    sampling_logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    stop_reason: StopReason | None = None
    weight_version: str = ""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class SpanPiece:
    """A copy of part of a span."""

    start: int
    kind: SpanKind
    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    stop_reason: StopReason | None  # only on the piece that holds the span's last token
    weight_version: str = ""


class History:
    """All tokens of a session, append-only but for `rewind`."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self.spans: list[Span] = []
        self._num_kept = 0
        self._counts = {kind: [0, 0] for kind in SpanKind}  # spans, tokens: kept, not counted, as histories are long

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> "array[int]":
        """All of them; to be read, not changed."""
        return self._tokens

    @property
    def num_bytes(self) -> int:
        """What is recorded of it: 4 bytes a token, and two logprobs of 8 for each that was sampled."""
        return 4 * len(self._tokens) + 16 * self._counts[SpanKind.SAMPLED][1]

    def slice(self, start: int, end: int) -> "array[int]":
        return self._tokens[start:end]

    def count(self, *kinds: SpanKind) -> tuple[int, int]:
        """How many spans of these kinds there are, and how many tokens in them."""
        return sum(self._counts[kind][0] for kind in kinds), sum(self._counts[kind][1] for kind in kinds)

    def _counted(self, kind: SpanKind, spans: int, tokens: int) -> None:
        self._counts[kind][0] += spans
        self._counts[kind][1] += tokens

    def give(self, tokens: Sequence[int], recalled: Recalled | None = None) -> None:
        """Add tokens, of which some may be quotes."""
        start, end = (recalled.start, recalled.start + recalled.length) if recalled else (len(tokens), len(tokens))
        self._give(SpanKind.GIVEN, tokens[:start])
        self._give(SpanKind.RECALLED, tokens[start:end])
        self._give(SpanKind.GIVEN, tokens[end:])

    def _give(self, kind: SpanKind, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        if not self.spans or self.spans[-1].kind is not kind:
            self.spans.append(Span(kind, len(self._tokens)))
            self._counted(kind, 1, 0)
        self._counted(kind, 0, len(tokens))
        self._tokens.extend(tokens)
        self.spans[-1].length += len(tokens)

    def begin_sampled(self) -> Span:
        """A new sampled span; it stays only if something is sampled into it."""
        return Span(SpanKind.SAMPLED, len(self._tokens))

    def sample(self, span: Span, token: Sampled) -> Span:
        """Add a token to the span, or to a new one where other weights have sampled it; returns that span."""
        if span.length and token.weight_version != span.weight_version:
            span = self.begin_sampled()
        if not span.length:
            span.weight_version = token.weight_version
            self.spans.append(span)
            self._counted(SpanKind.SAMPLED, 1, 0)
        self._counted(SpanKind.SAMPLED, 0, 1)
        self._tokens.append(token.token)
        span.length += 1
        span.logprobs.append(token.logprob)
        span.sampling_logprobs.append(token.sampling_logprob)
        return span

    def num_kept(self) -> int:
        """How many of the first tokens have stayed since this was last asked. For one who asks: who has an index."""
        num_kept, self._num_kept = self._num_kept, len(self._tokens)
        return num_kept

    def rewind(self, length: int) -> None:
        self._num_kept = min(self._num_kept, length)
        del self._tokens[length:]
        while self.spans and self.spans[-1].start >= length:
            gone = self.spans.pop()
            self._counted(gone.kind, -1, -gone.length)
        if self.spans and self.spans[-1].end > length:
            last = self.spans[-1]
            self._counted(last.kind, 0, length - last.end)
            last.length = length - last.start
            last.stop_reason = None
            del last.logprobs[last.length :], last.sampling_logprobs[last.length :]

    def copy(self, length: int) -> "History":
        """An independent history of the first `length` tokens."""
        other = History()
        other._tokens = self._tokens[:]
        other._counts = {kind: list(counts) for kind, counts in self._counts.items()}
        other.spans = [
            replace(span, logprobs=span.logprobs[:], sampling_logprobs=span.sampling_logprobs[:]) for span in self.spans
        ]
        other.rewind(length)
        return other

    def entries_since(self, session_id: str, start: int) -> list[Entry]:
        """What the history holds from `start` on, for the journal. Searches from the end, as histories are long."""
        found: list[Entry] = []
        for span in reversed(self.spans):
            if span.end <= start:
                break
            first = max(start, span.start)
            tokens = self._tokens[first : span.end]
            if span.kind is not SpanKind.SAMPLED:
                found.append(TokensGiven(session_id, tokens, is_recalled=span.kind is SpanKind.RECALLED))
                continue
            inner = slice(first - span.start, None)
            reason = span.stop_reason.value if span.stop_reason else None
            logprobs = span.logprobs[inner], span.sampling_logprobs[inner]
            found.append(TokensSampled(session_id, tokens, *logprobs, reason, span.weight_version))
        return found[::-1]

    def repeat(self, step: Step) -> None:
        """Apply what the journal has on record."""
        match step:
            case HistoryRewound():
                self.rewind(step.length)
            case TokensGiven():
                self._give(SpanKind.RECALLED if step.is_recalled else SpanKind.GIVEN, step.tokens)
            case TurnRecord():
                self.give(step.given, step.facts.recalled)
                turn_reason = StopReason.MAX_TOKENS if step.finish_reason == "length" else StopReason.EOS
                weights = step.facts.weight_spans or ((step.facts.weight_versions[0], len(step.sampled)),)
                logprobs = step.logprobs, step.sampling_logprobs
                self._sample_all(step.sampled, *logprobs, turn_reason, weights, num=step.num_lasting)
            case TokensSampled():
                reason = StopReason(step.stop_reason) if step.stop_reason else None
                weights = ((step.weight_version, len(step.tokens)),)
                self._sample_all(step.tokens, step.logprobs, step.sampling_logprobs, reason, weights)

    def _sample_all(
        self,
        tokens: "array[int]",
        logprobs: "array[float]",
        sampling_logprobs: "array[float]",
        reason: StopReason | None,
        weights: Sequence[tuple[str, int]],
        *,
        num: int | None = None,
    ) -> None:
        """Take in the first `num` tokens, or all."""
        span = self.begin_sampled()
        versions = itertools.chain.from_iterable(itertools.repeat(version, num) for version, num in weights)
        rows = zip(tokens, logprobs, sampling_logprobs, versions, strict=True)
        for token, logprob, sampling, version in itertools.islice(rows, num):
            sampled = Sampled(token=token, logprob=logprob, sampling_logprob=sampling, weight_version=version)
            span = self.sample(span, sampled)
        span.stop_reason = reason

    def pieces(self, start: int, end: int, *, limit: int) -> Iterator[SpanPiece]:
        """The tokens from `start` to `end`, span by span, at most `limit` a piece. Copies as it goes."""
        at = max(0, bisect.bisect_right(self.spans, start, key=lambda span: span.start) - 1)
        for span in itertools.islice(self.spans, at, None):
            if span.start >= end:
                break
            first = max(start, span.start)
            while first < min(end, span.end):
                last = min(end, span.end, first + limit)
                inner = slice(first - span.start, last - span.start)
                yield SpanPiece(
                    first,
                    span.kind,
                    self._tokens[first:last].tolist(),
                    span.logprobs[inner].tolist(),
                    span.sampling_logprobs[inner].tolist(),
                    span.stop_reason if last == span.end else None,
                    span.weight_version,
                )
                first = last


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """What is known of tokens that a generation is given: those of `turns` on record come first, as they were recorded;
    of the rest, which are quotes."""

    turns: Sequence[TurnRecord] = ()
    recalled: Recalled | None = None

    def add_to(self, history: History, tokens: Sequence[int]) -> None:
        start = len(history)
        for turn in self.turns:
            history.repeat(turn)
        history.give(tokens[len(history) - start :], self.recalled)


PLAIN = GivenTokens()


class GenerationRecord:
    """Records one generation into a history, each token once: the tokens it was given, then the sampled ones."""

    def __init__(self, history: History, tokens: Sequence[int], known: GivenTokens = PLAIN) -> None:
        self._history = history
        self.tokens = tokens
        self._known = known
        self.start = len(history)
        self.num_sampled = 0
        self._span = None if tokens else history.begin_sampled()

    def record(self, events: Sequence[Event], *, backend_length: int | None = None) -> None:
        """Take `events` over. Any event, or a backend that has grown, means that the tokens were taken in."""
        grown = backend_length is not None and backend_length > self.start
        if self._span is None and (events or grown):
            self._known.add_to(self._history, self.tokens)
            self._span = self._history.begin_sampled()
        for event in events:
            if isinstance(event, Sampled) and self._span:
                self._span = self._history.sample(self._span, event)
                self.num_sampled += 1
            elif isinstance(event, Done):
                self.end(event.stop_reason)

    def end(self, reason: StopReason | None) -> None:
        if self._span:
            self._span.stop_reason = reason
