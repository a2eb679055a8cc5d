"""What a trainer asks of a session, and what the session adds to every sample."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a trainer asks for. `num_layers` gives routed experts their shape where the upstream does not."""

    branch: str = "tip"
    max_seq_len: int | None = None
    min_weight_version: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # goes over the session's own
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.branch not in ("tip", "all"):
            raise InvalidArgument(f"branch must be tip or all, got {self.branch!r}", param="branch")
        for name, lowest in (("max_seq_len", 1), ("min_weight_version", 0), ("num_layers", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < lowest):
                raise InvalidArgument(f"{name} must be a whole number from {lowest} on, got {value!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """What a session adds to each of its samples. `summary` becomes the export's `session_metadata`."""

    session_id: str = ""
    group: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None  # for the whole session; without it, a sample's is the sum of its turns'
    summary: Mapping[str, Any] = field(default_factory=dict)
