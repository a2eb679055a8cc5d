"""Speculation: drafts that the engine verifies in one forward. What is sampled decides, a draft only saves time."""

from holdfast.engine.speculative.ngram import NGram
from holdfast.engine.speculative.proposer import Draft, DraftRequest, Proposer
from holdfast.engine.speculative.speculator import Speculator

__all__ = ["Draft", "DraftRequest", "NGram", "Proposer", "Speculator"]
