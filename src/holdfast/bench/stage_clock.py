"""Where a process spends its CPU time: a look at the stack every few milliseconds, counted by part of the program."""

import signal
from collections import Counter
from types import FrameType

INTERVAL_S = 0.005  # of CPU time

# The innermost frame that is listed here says which stage it was.
_STAGES = {
    "/backends/validation.py": "decode",
    "/backends/cutting.py": "decode",
    "/backends/lane.py": "decode",
    "/holdfast/backends/": "upstream",
    "/aiohttp/": "upstream",
    "/yarl/": "upstream",
    "/holdfast/chats/": "turn",
    "/holdfast/sessions/": "turn",
    "/holdfast/chat/": "turn",
    "/jinja2/": "turn",
    "/tokenizers/": "turn",
    "/holdfast/serving/": "client",
    "/starlette/": "client",
    "/uvicorn/": "client",
    "/h11/": "client",
    "/httptools/": "client",
    "/asyncio/selector_events.py": "sockets",
    "/asyncio/": "loop",
    "/selectors.py": "loop",
}
STAGES = (*dict.fromkeys(_STAGES.values()), "other")


class StageClock:
    """Counts looks by stage, on the main thread, from `start` on."""

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()
        self._known: dict[str, str | None] = {}

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _look(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if path not in self._known:
                self._known[path] = stage_of(path)
            if (stage := self._known[path]) is not None:
                self.looks[stage] += 1
                return
            frame = frame.f_back
        self.looks["other"] += 1


def stage_of(path: str) -> str | None:
    """The stage that a source file belongs to."""
    return next((stage for part, stage in _STAGES.items() if part in path.replace("\\", "/")), None)
