"""What every tool call parser takes and gives."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: `arguments` is the text of a JSON object. Ids are given by others."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Text of one reply in pieces; content and complete calls out. Text that is no call after all is content."""

    def push(self, text: str) -> Parsed:
        """What is certain by now."""

    def finish(self) -> Parsed:
        """What was held back, as no more text will come."""
