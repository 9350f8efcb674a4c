"""The results of `./dev bench versus` as one picture: latency, CPU and memory of the peer and of tidemill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from versus_report import NAMES, Lanes, caption, compared, seconds_text, total

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


def plot(lanes: Lanes) -> str:
    """Return an SVG of latency, CPU and memory: the first peer and tidemill, at each rate.

    Raises ValueError unless both have a rate in common.
    """
    peer, common = compared(lanes)
    pairs = [(rate, side, lanes[f"{side}/{rate}"]) for rate in common for side in (peer, "tidemill")]
    body = _top(len(pairs), 0)
    tops = [TOP, TOP + HEADING + body + AXIS, TOP + 2 * (HEADING + body) + AXIS]
    height = tops[-1] + HEADING + body + 8
    parts = [HEAD.format(width=WIDTH, height=height, title=escape(caption(peer)))]
    parts += _legend(peer)
    parts += _latency_panel(pairs, tops[0])
    parts += _bar_panel("processor, % of a core", pairs, [one["cpu_total_percent"] for _, _, one in pairs], tops[1])
    parts += _bar_panel("resident memory, MiB", pairs, [total(one, "rss_mib") for _, _, one in pairs], tops[2])
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
        label = f"{seconds_text(one['latency_s']['p50'])} – {seconds_text(one['latency_s']['p99'])}"
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
