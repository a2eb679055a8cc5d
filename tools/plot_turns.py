"""Draws the picture of the README: the latency of a turn over the turns of one session, beside a stateless client.

.venv/bin/holdfast bench long-session --turns 150 --duration-s 280 --control-share 0.65
.venv/bin/python tools/plot_turns.py bench/results/long-session-DATE.json    # writes docs/images/turn-latency.*
.venv/bin/python tools/plot_turns.py docs/images/turn-latency.json           # draws the kept figures again
"""

import json
import sys
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs/images"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 740, 340, 70, 160, 56, 52  # on a white card, for dark pages too
_STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 14px system-ui, sans-serif; fill: #24292f }
.title { font-size: 17px; font-weight: 600 }
.small { font-size: 12px; fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 }
.ours { stroke: #0a7d4b; fill: #0a7d4b } .stateless { stroke: #c4432b; fill: #c4432b }
polyline { fill: none !important; stroke-width: 3; stroke-linejoin: round }
text.ours, text.stateless { stroke: none; font-weight: 600 }"""


def points(report: dict[str, Any]) -> dict[str, Any]:
    """What is drawn, and where it comes from: (turn, seconds) of both clients."""
    if "points" in report:
        return report
    series = {name: found["values"] for name, found in report["series"].items()}
    turns = {moment: turn for turn, moment in enumerate(series["openai/at_s"], 1)}
    measured = zip(series["stateless/at_s"], series["stateless/turn_ms"], strict=True)
    return {
        **{name: report[name] for name in ("command", "started_at", "commit", "hardware", "load_before", "settings")},
        "points": {
            "session": [(turn, round(ms / 1000, 3)) for turn, ms in enumerate(series["openai/turn_ms"], 1)],
            "stateless": [(turns[moment], round(ms / 1000, 3)) for moment, ms in measured],
        },
    }


def svg(drawn: dict[str, Any]) -> str:
    session, stateless = drawn["points"]["session"], drawn["points"]["stateless"]
    last, top = session[-1][0], max(seconds for _, seconds in stateless)
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100) if top / size <= 6)
    stride = next(size for size in (5, 10, 20, 50, 100, 200) if last / size <= 8)

    def x(turn: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * turn / last

    def y(seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / (top * 1.05)

    def line(name: str, values: list[tuple[int, float]]) -> str:
        return f'<polyline class="{name}" points="{" ".join(f"{x(t):.1f},{y(s):.1f}" for t, s in values)}"/>'

    def label(name: str, value: tuple[int, float], above: str, below: str) -> str:
        left, height = x(value[0]) + 10, min(y(value[1]), HEIGHT - BOTTOM - 22)
        return (
            f'<text class="{name}" x="{left:.0f}" y="{height:.0f}">{above}</text>'
            f'<text class="small" x="{left:.0f}" y="{height + 18:.0f}">{below}</text>'
        )

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(s):.1f}" y2="{y(s):.1f}"/>'
        f'<text class="small" x="{LEFT - 8}" y="{y(s) + 4:.1f}" text-anchor="end">{s} s</text>'
        for s in range(0, int(top) + 1, step)
    )
    ticks = "".join(
        f'<text class="small" x="{x(turn):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{turn}</text>'
        for turn in range(stride, last + 1, stride)
    )
    typical = sorted(seconds for _, seconds in session)[len(session) // 2]
    dots = "".join(f'<circle class="stateless" cx="{x(t):.1f}" cy="{y(s):.1f}" r="3"/>' for t, s in stateless)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
<title>Seconds until a turn is complete, over {last} turns: a session stays flat, a stateless client rises</title>
<style>{_STYLE}
</style>
<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>
<text class="title" x="{LEFT - 48}" y="26">Seconds per turn, as the conversation grows</text>
{grid}{ticks}
<text class="small" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">turn</text>
{line("stateless", stateless)}{dots}
{line("ours", session)}
{label("stateless", stateless[-1], "stateless", f"{stateless[-1][1]:.0f} s: all tokens again")}
{label("ours", (session[-1][0], typical), "Holdfast session", f"{typical:.1f} s: new tokens only")}
</svg>
"""


def main(path: str) -> None:
    drawn = points(json.loads(Path(path).read_text(encoding="utf-8")))
    (IMAGES / "turn-latency.json").write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    (IMAGES / "turn-latency.svg").write_text(svg(drawn), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
