"""The results of `./dev bench versus` as a table in Markdown, and in words.

Results are a mapping of lanes: `SIDE/RATE` or `SIDE/kill`, where a side is a stack with its pace (`versus.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

OUTSIDE = ("postgres", "load", "reader", "other", "stolen")
"""Roles that are not part of a stack."""
NAMES = {
    "delta": "Debezium, Kafka, Spark, Delta",
    "iceberg": "Debezium, Kafka, Spark, Iceberg",
    "tidemill": "tidemill",
}
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
        add(f"{rate} commits/s: processes", rate, lambda one: str(total(one, "processes")))
        add(f"{rate} commits/s: disk, MiB", rate, lambda one: _parts(one["disk_mib"]))
        add(f"{rate} commits/s: compared with SELECT", rate, _verified)
    add("one SIGKILL of each process: worst row", "kill", _kills)
    add("restarted from outside", "kill", lambda one: _restarts(one["restarted_from_outside"]))
    add("compared with SELECT", "kill", _verified)
    if rates(lanes):
        add("lines of configuration and code", rates(lanes)[0], lambda one: _parts(one["lines"]))
        add("measured", rates(lanes)[0], _measured)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _measured(one: Mapping[str, Any]) -> str:
    return f"{one['at'][:10]}, {one['window_s']:.0f} s after {one['warm_s']:g} s, {one['machine'].partition(',')[0]}"


def _latency(one: Mapping[str, Any]) -> str:
    return " / ".join(seconds_text(one["latency_s"][name]) for name in ("p50", "p90", "p99")) + " s"


def seconds_text(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _cpu(one: Mapping[str, Any]) -> str:
    # The time of a child that ended moves to its parent, so its own role may be below zero.
    parts = {role: max(value, 0.0) for role, value in one["cpu_percent"].items() if role not in OUTSIDE}
    text = _parts(parts, one["cpu_total_percent"])
    if not one["disturbed"]:
        return text
    return f"{text}; disturbed: other work {one['cpu_percent']['other']:.0f}, stolen {one['cpu_percent']['stolen']:.0f}"


def _memory(one: Mapping[str, Any]) -> str:
    parts = {role: sizes["rss_mib"] for role, sizes in one["memory"].items()}
    return _parts(parts, more=f" ({total(one, 'pss_mib'):,})")


def total(one: Mapping[str, Any], what: str) -> int:
    return int(sum(sizes[what] for sizes in one["memory"].values()))


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
        f"{role} {kill['worst_row_s']:.1f} s" + ("" if kill["recovered"] else " (not recovered in time)")
        for role, kill in one["kills"].items()
    )


def _restarts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{role} {count} ×" for role, count in found.items()) or "nothing"


def sentences(lanes: Lanes) -> str:
    """Return the main results in words: those of the first rate that both sides have, and of a lower one.

    Raises ValueError unless both have a rate in common.
    """
    peer, common = compared(lanes)
    theirs, ours = ([lanes[f"{side}/{rate}"] for rate in common] for side in (peer, "tidemill"))
    lines = []
    for rate, a, b in zip(common, theirs, ours, strict=True):
        ratio = a["latency_s"]["p50"] / b["latency_s"]["p50"]
        lines.append(
            f"At {rate} commits/s a row is in tidemill's table after {_pair(b)} (p50 and p99), and after {_pair(a)}"
            f" through {NAMES[peer]}: {ratio:.0f} times as late at p50. tidemill uses {b['cpu_total_percent']:.0f} %"
            f" of a core and {total(b, 'rss_mib'):,} MiB, the peer {a['cpu_total_percent']:.0f} % and"
            f" {total(a, 'rss_mib'):,} MiB."
        )
    equal = not any(one["unequal"] for one in (*theirs, *ours))
    rows = [sum(one["verified"]["rows"] for one in side) for side in (theirs, ours)]
    lines.append(
        f"Compared with SELECT, {'' if equal else 'not '}all rows are equal on both sides"
        f" ({rows[0]:,} and {rows[1]:,}); the peer is {sum(theirs[0]['lines'].values())} lines of configuration and"
        f" code, tidemill {sum(ours[0]['lines'].values())}."
    )
    return " ".join(lines)


def _pair(one: Mapping[str, Any]) -> str:
    return f"{seconds_text(one['latency_s']['p50'])} s and {seconds_text(one['latency_s']['p99'])} s"


def compared(lanes: Lanes) -> tuple[str, list[str]]:
    """Return the first peer, and the rates at which it and tidemill were measured.

    Raises ValueError if there is no such rate.
    """
    peer = next((side for side in sides(lanes) if side in ("delta", "iceberg")), "")
    common = [rate for rate in rates(lanes) if f"{peer}/{rate}" in lanes and f"tidemill/{rate}" in lanes]
    if not common:
        raise ValueError("there is no rate at which both the peer and tidemill were measured")
    return peer, common


def caption(peer: str) -> str:
    return f"Commit to table, processor time and memory of {NAMES[peer]} and of tidemill"
