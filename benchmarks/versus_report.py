"""The results of `./dev bench versus` as a table in Markdown, and as one picture.

Results are a mapping of lanes: `SIDE/RATE` or `SIDE/kill`, where a side is a stack with its pace (`versus.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versus.json"
PICTURE = ROOT / "docs" / "images" / "versus.svg"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
PLACE = re.compile(r"(<!-- versus -->\n).*?(\n<!-- /versus -->)", re.DOTALL)
"""Place of the table in PAGE."""

OUTSIDE = ("postgres", "load", "reader", "other", "stolen")
"""Roles that are not part of a stack."""
NAMES = {
    "delta": "Debezium, Kafka, Spark, Delta",
    "iceberg": "Debezium, Kafka, Spark, Iceberg",
    "tidemill": "tidemill",
}
WIDTH = 720
ROW = 20
GAP = 8
"""Space between two rates."""
LABELS = 170
TOP = 40
HEADING = 30
AXIS = 14
"""Height of the numbers below the axis."""
SECONDS = (0.01, 0.1, 1.0, 10.0, 100.0)

Lanes = Mapping[str, Mapping[str, Any]]


def sides(lanes: Lanes) -> list[str]:
    """Return the sides in the order of NAMES, those of another pace after the usual ones."""
    order = list(NAMES)
    found = {lane.partition("/")[0] for lane in lanes}
    return sorted(found, key=lambda side: ("@" in side, order.index(side.partition("@")[0]), side))


def rates(lanes: Lanes) -> list[str]:
    found = {lane.partition("/")[2] for lane in lanes} - {"kill"}
    return sorted(found, key=float, reverse=True)


def title(side: str) -> str:
    """Return the heading of a side: its name, and its pace unless that is the default."""
    name, _, pace = side.partition("@")
    setting = "freshness" if name == "tidemill" else "trigger"
    return NAMES[name] + (f", {setting} {pace.removesuffix('s')} s" if pace else "")


def table(lanes: Lanes) -> str:
    """Return all results as a table in Markdown, a column for each side."""
    columns = sides(lanes)
    rows = [("", *map(title, columns)), ("---", *("---" for _ in columns))]

    def add(label: str, lane: str, cell: Callable[[Mapping[str, Any]], str]) -> None:
        found = [lanes.get(f"{side}/{lane}") for side in columns]
        if any(found):
            rows.append((label, *("–" if one is None else cell(one) for one in found)))

    for rate in rates(lanes):
        add(f"{rate} commits/s: commit → table, p50 / p90 / p99", rate, _latency)
        add(f"{rate} commits/s: CPU, % of a core", rate, _cpu)
        add(f"{rate} commits/s: resident (proportional), MiB", rate, _memory)
        add(f"{rate} commits/s: processes", rate, lambda one: str(_sum(one, "processes")))
        add(f"{rate} commits/s: disk, MiB", rate, lambda one: _parts(one["disk_mib"]))
        add(f"{rate} commits/s: compared with SELECT", rate, _verified)
    add("one SIGKILL of each process: worst row", "kill", _kills)
    add("restarted from outside", "kill", lambda one: _restarts(one["restarted_from_outside"]))
    add("compared with SELECT", "kill", _verified)
    if rates(lanes):
        add("lines of configuration and code", rates(lanes)[0], lambda one: _parts(one["lines"]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _latency(one: Mapping[str, Any]) -> str:
    return " / ".join(_seconds(one["latency_s"][name]) for name in ("p50", "p90", "p99")) + " s"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _cpu(one: Mapping[str, Any]) -> str:
    parts = {role: value for role, value in one["cpu_percent"].items() if role not in OUTSIDE}
    text = _parts(parts, one["cpu_total_percent"])
    return text + (f"; disturbed: other work {one['cpu_percent']['other']:.0f}" if one["disturbed"] else "")


def _memory(one: Mapping[str, Any]) -> str:
    total, shared = _sum(one, "rss_mib"), _sum(one, "pss_mib")
    return _parts({role: sizes["rss_mib"] for role, sizes in one["memory"].items()}, total, f" ({shared:,})")


def _sum(one: Mapping[str, Any], what: str) -> int:
    return round(sum(sizes[what] for sizes in one["memory"].values()))


def _parts(parts: Mapping[str, float], total: float | None = None, more: str = "") -> str:
    """Return the sum, and the largest parts first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    text = f"{sum(parts.values()) if total is None else total:,.0f}{more}"
    return text + (": " + ", ".join(f"{name} {value:,.0f}" for name, value in ordered) if len(ordered) > 1 else "")


def _verified(one: Mapping[str, Any]) -> str:
    found = one["verified"]
    wrong = ", ".join(f"{found[what]} {what}" for what in ("missing", "extra", "different"))
    return f"{found['rows']:,} rows, {'all equal' if not one['unequal'] else wrong}"


def _kills(one: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{role} {kill['worst_row_s']:.1f} s" + ("" if kill["recovered"] else " (not recovered)")
        for role, kill in one["kills"].items()
    )


def _restarts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{role} {count} ×" for role, count in found.items()) or "nothing"


def published_table(page: str) -> str:
    """Return the table in a page. Raises ValueError without the place for it."""
    found = PLACE.search(page)
    if found is None:
        raise ValueError("the page has no place for the table")
    return found[0].removeprefix(found[1]).removesuffix(found[2])


def publish(lanes: Lanes) -> None:
    """Write results, picture, and the table of the page."""
    text = table(lanes)
    page = PAGE.read_text()
    published_table(page)
    picture = plot(lanes)
    RESULTS.write_text(json.dumps(lanes, indent=1, sort_keys=True) + "\n")
    PICTURE.write_text(picture)
    PAGE.write_text(PLACE.sub(lambda found: found[1] + text + found[2], page))


def plot(lanes: Lanes) -> str:
    """Return an SVG of latency, CPU and memory: the first peer and tidemill, at each rate.

    Raises ValueError unless both have a rate in common.
    """
    peer = next((side for side in sides(lanes) if side in ("delta", "iceberg")), "")
    common = [rate for rate in rates(lanes) if f"{peer}/{rate}" in lanes and f"tidemill/{rate}" in lanes]
    if not common:
        raise ValueError("there is no rate at which both the peer and tidemill were measured")
    pairs = [(rate, side, lanes[f"{side}/{rate}"]) for rate in common for side in (peer, "tidemill")]
    body = _top(len(pairs), 0)
    tops = [TOP, TOP + HEADING + body + AXIS, TOP + 2 * (HEADING + body) + AXIS]
    height = tops[-1] + HEADING + body + 8
    told = f"Commit to table, processor time and memory of {NAMES[peer]} and of tidemill"
    parts = [HEAD.format(width=WIDTH, height=height, title=escape(told))]
    parts += _legend(peer)
    parts += _latency_panel(pairs, tops[0])
    parts += _bar_panel("processor, % of a core", pairs, [one["cpu_total_percent"] for _, _, one in pairs], tops[1])
    parts += _bar_panel("resident memory, MiB", pairs, [_sum(one, "rss_mib") for _, _, one in pairs], tops[2])
    return "\n".join([*parts, "</svg>", ""])


Pairs = list[tuple[str, str, Mapping[str, Any]]]


def _legend(peer: str) -> list[str]:
    return [
        '<rect class="peer" x="24" y="16" width="12" height="12"/>',
        f'<text x="42" y="26">{escape(NAMES[peer])}</text>',
        '<rect class="ours" x="300" y="16" width="12" height="12"/>',
        '<text x="318" y="26">tidemill</text>',
    ]


def _top(at: int, top: float) -> float:
    """Return the upper edge of a bar. Every second one begins another rate."""
    return top + ROW * at + GAP * (at // 2)


def _rows(name: str, pairs: Pairs, top: float) -> list[str]:
    out = [f'<text class="title" x="24" y="{top + 16:g}">{escape(name)}</text>']
    for at, (rate, _, _) in enumerate(pairs):
        if at % 2 == 0:
            out.append(f'<text x="24" y="{_top(at, top + HEADING) + ROW + 3:g}">{escape(rate)} commits/s</text>')
    return out


def _latency_panel(pairs: Pairs, top: float) -> list[str]:
    """Draw a bar from p50 to p99 on a logarithmic axis."""
    out = _rows("from commit to table, p50 to p99, seconds", pairs, top)
    bottom = _top(len(pairs), top + HEADING) - GAP
    for tick in SECONDS:
        x = _logarithmic(tick)
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top + HEADING - 4:g}" y2="{bottom:g}"/>')
        out.append(f'<text class="small" x="{x:.1f}" y="{bottom + 14:g}" text-anchor="middle">{tick:g}</text>')
    for at, (_, side, one) in enumerate(pairs):
        left, right = _logarithmic(one["latency_s"]["p50"]), _logarithmic(one["latency_s"]["p99"])
        y = _top(at, top + HEADING)
        label = f"{_seconds(one['latency_s']['p50'])} – {_seconds(one['latency_s']['p99'])}"
        out.append(_bar(side, left, y, max(right - left, 3)))
        out.append(f'<text class="small" x="{right + 6:.1f}" y="{y + 11:g}">{label}</text>')
    return out


def _bar_panel(name: str, pairs: Pairs, values: list[float], top: float) -> list[str]:
    out = _rows(name, pairs, top)
    for at, ((_, side, _), value) in enumerate(zip(pairs, values, strict=True)):
        width = max(1.0, value / max(*values, 1) * (WIDTH - LABELS - 80))
        y = _top(at, top + HEADING)
        out.append(_bar(side, LABELS, y, width))
        out.append(f'<text class="small" x="{LABELS + width + 6:.1f}" y="{y + 11:g}">{value:,.0f}</text>')
    return out


def _bar(side: str, x: float, y: float, width: float) -> str:
    kind = "ours" if side == "tidemill" else "peer"
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW - 6}" rx="2"/>'


def _logarithmic(seconds: float) -> float:
    """Return the place of a latency on the axis, which ends at its first and last tick."""
    first, last = math.log10(SECONDS[0]), math.log10(SECONDS[-1])
    part = (math.log10(max(seconds, SECONDS[0])) - first) / (last - first)
    return LABELS + min(part, 1.0) * (WIDTH - LABELS - 110)


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{title}">
<title>{title}</title>
<style>
  .paper {{ fill: #ffffff; }}
  text {{ font-family: Helvetica, Arial, "Liberation Sans", sans-serif; font-size: 12px; fill: #1d2733; }}
  .title {{ font-weight: bold; }}
  .small {{ font-size: 11px; }}
  .peer {{ fill: #8b949e; }}
  .ours {{ fill: #2563a8; }}
  .axis {{ stroke: #d5d9de; }}
  @media (prefers-color-scheme: dark) {{
    .paper {{ fill: #161b22; }}
    text {{ fill: #e6edf3; }}
    .ours {{ fill: #5aa2ee; }}
    .axis {{ stroke: #39414b; }}
  }}
</style>
<rect class="paper" width="{width}" height="{height}" rx="8"/>"""  # noqa: E501
