"""Who drafts tokens, and how a draft is asked for."""

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from holdfast.engine.sequence import Sequence
from holdfast.generation import SamplingParams


class DraftRequest(NamedTuple):
    """At most `limit` tokens that may follow the sequence's history, drawn as `params` would draw them."""

    sequence: Sequence
    params: SamplingParams
    limit: int


class Draft(NamedTuple):
    """`strength` sorts drafts by how much evidence there is for them: each sort earns its own trust."""

    tokens: list[int]
    strength: int = 0


EMPTY_DRAFT = Draft([])


class Proposer(Protocol):
    """Owned by the thread that steps the engine."""

    @property
    def num_strengths(self) -> int: ...

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        """One draft per request, of at most `limit` tokens; empty where it has no proposal. Mutates itself."""

    def forget(self, sequence_id: int) -> None:
        """The sequence is gone."""
