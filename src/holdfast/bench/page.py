"""A report to look at: a plot, and one self-contained HTML page. Plots need matplotlib; tables do not."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.bench.report import Report

HOW_TO_PLOT = "no plot without matplotlib: pip install 'holdfast[bench]'"
_COLOURS = ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#2e4057", "#8d96a3", "#a05195")


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures or series `names`: their distribution, their values in order, or their medians with the spread."""

    title: str
    kind: Literal["distribution", "course", "bars"]
    names: tuple[str, ...]
    label: str
    is_log: bool = False


def plot(report: Report, charts: Sequence[Chart]) -> bytes | None:
    """A PNG; None if matplotlib is not installed or nothing was measured."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return None
    shown = [chart for chart in charts if any(report.values(name) for name in chart.names)]
    if not shown:
        return None
    heights = [0.8 + 0.25 * len(chart.names) if chart.kind == "bars" else 3.4 for chart in shown]
    canvas = Canvas(figsize=(7.5, sum(heights) + 0.4), layout="constrained")
    rows = canvas.subplots(len(shown), squeeze=False, height_ratios=heights)[:, 0]
    for axes, chart in zip(rows, shown, strict=True):
        _draw(axes, chart, report)
    quick = " (quick)" if report.is_quick else ""
    canvas.suptitle(f"{report.scenario}{quick}, {report.started_at[:10]}, {report.commit[:9] or 'no commit'}")
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw(axes: Any, chart: Chart, report: Report) -> None:
    names = [name for name in chart.names if report.values(name)]
    contestants = list(dict.fromkeys(name.partition("/")[0] for name in chart.names))
    for name in names:
        values, colour = report.values(name), _COLOURS[contestants.index(name.partition("/")[0]) % len(_COLOURS)]
        if chart.kind == "distribution":
            axes.plot(sorted(values), [(i + 1) / len(values) for i in range(len(values))], label=name, color=colour)
        elif chart.kind == "course":
            axes.plot(range(1, len(values) + 1), values, label=name, color=colour, marker="o", markersize=3)
        elif (figure := report.figures.get(name)) and (found := figure.summary):
            spread = [[found.median - found.low], [found.high - found.median]]
            axes.barh(name, found.median, xerr=spread, color=colour, capsize=3)
    if chart.kind == "bars":
        axes.invert_yaxis()
    else:
        axes.legend(frameon=False)
    if chart.kind == "course":
        axes.xaxis.get_major_locator().set_params(integer=True)
    (axes.set_ylabel if chart.kind == "course" else axes.set_xlabel)(chart.label)
    if chart.is_log:
        (axes.set_yscale if chart.kind == "course" else axes.set_xscale)("log")
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def page(report: Report, image: bytes | None) -> str:
    state = [name for name, holds in (("quick", report.is_quick), ("partial", report.is_partial)) if holds]
    picture = "<p>" + html.escape(HOW_TO_PLOT) + "</p>"
    if image:
        picture = f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
    gates = [(("pass" if g.passed else "FAIL"), g.name, g.reason) for g in report.gates]
    figures = [
        (name, f"{s.median:.4g}", f"{s.low:.4g} to {s.high:.4g}", f.unit, f.better, s.count)
        for name, f in report.figures.items()
        if (s := f.summary)
    ]
    facts = {
        "command": report.command,
        "date": report.started_at,
        "duration": f"{report.duration_s:g} s",
        "commit": report.commit or "unknown",
        "load": f"{report.load_before} before, {report.load_after} after",
        **report.hardware,
        **report.versions,
        **{f"setting {name}": value for name, value in report.settings.items()},
    }
    return _PAGE.format(
        title=html.escape(f"{report.scenario} {' '.join(state)}".strip()),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in report.notes),
        gates=_table(("", "gate", "reason"), gates),
        picture=picture,
        figures=_table(("figure", "median", "spread", "unit", "better", "rounds"), figures),
        facts=_table(("", ""), facts.items()),
    )


def _table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def row(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>holdfast bench: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top }}
img {{ max-width: 100% }}
</style>
<h1>{title}</h1>{notes}
<h2>Gates</h2>{gates}
{picture}
<h2>Figures</h2>{figures}
<h2>How it was measured</h2>{facts}
</html>
"""
