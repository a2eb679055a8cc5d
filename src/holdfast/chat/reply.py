"""A reply's raw text, as it comes, to what a client is told: content, reasoning, tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.chat.reasoning import ReasoningSplit, Split
from holdfast.chat.stop_strings import StopStrings
from holdfast.chat.tool_calls import Parsed, ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class Delta:
    """What has become certain. False when that is nothing."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ReplyReader:
    """Text -> stop strings -> reasoning -> tool calls. Without any of them text passes untouched.

    Stop strings are looked for in the raw text, so one inside reasoning or inside a call ends the reply too. Once
    `stopped_by` is set no more text is needed; `finish` still has what was held back.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        reasoning: ReasoningSplit | None = None,
        tools: ToolCallParser | None = None,
    ) -> None:
        self._stop = StopStrings(stop)
        self._reasoning = reasoning
        self._tools = tools

    @property
    def stopped_by(self) -> str | None:
        return self._stop.matched

    def push(self, text: str) -> Delta:
        split = self._split(self._stop.push(text))
        parsed = self._parse(split.content)
        return Delta(parsed.content, split.reasoning, parsed.calls)

    def finish(self) -> Delta:
        split = self._split(self._stop.finish())
        held = self._reasoning.finish() if self._reasoning else Split("", "")
        parsed = self._parse(split.content + held.content)
        last = self._tools.finish() if self._tools else Parsed()
        return Delta(parsed.content + last.content, split.reasoning + held.reasoning, parsed.calls + last.calls)

    def _split(self, text: str) -> Split:
        return self._reasoning.push(text) if self._reasoning else Split("", text)

    def _parse(self, content: str) -> Parsed:
        return self._tools.push(content) if self._tools else Parsed(content)
