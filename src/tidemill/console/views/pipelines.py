"""Pipelines: their drivers, tables and failures, as `pipeline list` and `pipeline describe` print them.

Computed from the configuration, the catalogue's rows, the tables' states and the reports of the drivers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tidemill.base.status.drivers import driver_reports, is_silent, pipeline_of, processes_sharing_driver
from tidemill.base.status.status import DerivedStatus, StageState, StatusReport, derive_statuses, lag_of, this_process

if TYPE_CHECKING:
    from tidemill.metastore.rows.catalogue import PipelineRow
    from tidemill.shards.state.state import ShardState

PREFIX = "pipeline:"


@dataclass
class PipelineView:
    """State of one pipeline. The rows of `tables`, `instances` and `failing` are printed by `describe --json`."""

    name: str
    file: str = ""
    letters: str = ""
    dead_letters: int = 0
    tables: list[dict[str, Any]] = field(default_factory=list)
    instances: list[dict[str, Any]] = field(default_factory=list)
    failing: list[dict[str, Any]] = field(default_factory=list)
    """Failing parts of its drivers: the session, a feed, or a table that it may not maintain."""

    def summary(self) -> dict[str, Any]:
        states = [instance["state"] for instance in self.instances]
        lags = [table["lag_ms"] for table in self.tables] or [None]
        return {
            "pipeline": self.name,
            "file": self.file,
            "running": len(states) - states.count("silent") - states.count("parked"),
            "silent": states.count("silent"),
            "parked": states.count("parked"),
            "tables": [table["table"] for table in self.tables],
            "lag_ms": None if None in lags else max(lags),
            "dead_letters": self.dead_letters,
        }


def pipeline_views(
    files: Mapping[str, str],
    rows: Mapping[str, PipelineRow],
    shards: Mapping[str, ShardState],
    reports: Sequence[StatusReport],
    now_ms: int,
    modified_ms: Mapping[str, int],
) -> dict[str, PipelineView]:
    """Return the view of every pipeline that is configured, in the catalogue, or reporting.

    `files`: configured pipeline → its file. `modified_ms`: pipeline → when that file was last written, if known here.
    """
    marks = derive_statuses(reports, now_ms)
    reporting = {pipeline_of(report.process) for report in reports} - {""}
    out = {}
    for name in sorted({*files, *rows, *reporting}):
        mine = driver_reports(reports, name)
        view = out[name] = PipelineView(name)
        row = rows.get(name)
        view.file = files.get(name, "")
        changed_ms = modified_ms.get(name, 0)
        view.instances = [instance_row(report, name, reports, now_ms, changed_ms) for report in mine]
        view.failing = [
            {"mark": mark, "state": str(derived.state), "reason": derived.mark.error}
            for mark, derived in sorted(marks.items())
            if mark.startswith(f"{PREFIX}{name}:") and derived.mark.error
        ]
        if row is None:
            continue
        view.letters = row.dead_letters
        view.dead_letters = shards[row.dead_letters].rows if row.dead_letters in shards else 0
        for table, fed_by in sorted(row.tables.items()):
            stored = shards[table].rows if table in shards else 0
            upper = shards[table].upper if table in shards else 0
            found = table_row(table, fed_by, upper, stored, marks.get(f"shard:{table}"), mine)
            if table in row.derived:
                found |= _derived_table_fields(table, row.derived[table], mine)
            view.tables.append(found)
    return out


def table_row(
    name: str, fed_by: str, upper: int, stored: int, mark: DerivedStatus | None, reports: Sequence[StatusReport]
) -> dict[str, Any]:
    """Return one row of `tables`.

    `lag_ms` is how much newer than the table its inputs are; None while the table has no time or no process reports it.
    `rows` is the number of rows; None = not counted. `written` is the number of updates that the reporting drivers
    wrote since they started, `updates` the number in the shard. `seats` lists the processes in which the table takes
    part.
    """
    is_reported = mark is not None and mark.state is not StageState.BLIND
    facts = {r.process: _table_facts(r)[name] for r in reports if name in _table_facts(r)}
    return {
        "table": name,
        "input": fed_by,
        "upper": upper,
        "state": str(mark.state) if mark is not None else "",
        "lag_ms": lag_of(replace(mark.mark, position=max(upper, mark.mark.position))) if mark and is_reported else None,
        "held_by": mark.blocker if mark is not None else "",
        "reason": mark.mark.reason if mark is not None else "",
        "updates": stored,
        "rows": None,
        "written": sum(int(fact.get("rows", 0)) for fact in facts.values()) if facts else None,
        "won": sum(int(fact.get("won", 0)) for fact in facts.values()),
        "lost": sum(int(fact.get("lost", 0)) for fact in facts.values()),
        "seats": sorted(facts),
        **_sum_counts("violations", facts.values()),
        **_sum_counts("sequence", facts.values()),
    }


def _sum_counts(field: str, facts: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the field, if these drivers report it: numbers of records in their appends since they started.

    violations: by expectation; sequence: `late`, and `revived`: late after a tombstone of their key had expired.
    """
    found: dict[str, int] = {}
    for fact in facts:
        for name, count in fact.get(field, {}).items():
            found[name] = found.get(name, 0) + int(count)
    return {field: found} if found else {}


def count_metrics(field: str, reports: Sequence[StatusReport]) -> list[tuple[str, str, str, int]]:
    """Return (process, table, name, records since it started) of all drivers, for a field as of `_sum_counts`."""
    return [
        (report.process, table, name, int(count))
        for report in reports
        for table, fact in sorted(_table_facts(report).items())
        for name, count in sorted(fact.get(field, {}).items())
    ]


def _derived_table_fields(
    name: str, inputs: dict[str, tuple[str, ...]], reports: Sequence[StatusReport]
) -> dict[str, Any]:
    """Return the additional fields of a derived table.

    `inputs` maps each input to the columns that group it. `maintained` is `by group`, `whole`, or for a history
    `by change`, with the reason.
    `last_groups` is how many groups the last round of a reporting driver computed, with the reason: −1 means all, None
    means no round yet.
    """
    by = [f"{i} ({', '.join(columns)})" for i, columns in inputs.items() if columns]
    whole = [i for i, columns in inputs.items() if not columns]
    why = f"by=… groups by {', '.join(by)}" if by else "no by=… names the columns to group by"
    if by and whole:
        why += f"; a change in {', '.join(whole)}, which is read whole, recomputes everything"
    last = max(
        (_table_facts(r)[name] for r in reports if _table_facts(r).get(name, {}).get("recomputed")),
        key=lambda fact: int(fact["recomputed"]),
        default={},
    )
    how = "by group" if by else "whole"
    if any(_table_facts(report).get(name, {}).get("history") for report in reports):
        how, why = "by change", "a history follows the changes of its input"
    return {
        "inputs": {i: list(columns) for i, columns in inputs.items()},
        "maintained": how,
        "maintained_why": why,
        "last_groups": last.get("groups"),
        "last_whole_why": last.get("whole_because", ""),
    }


def instance_row(
    report: StatusReport, name: str, reports: Sequence[StatusReport], now_ms: int, changed_ms: int = 0
) -> dict[str, Any]:
    """Return one row of `instances`.

    `older_than_file` is set if the driver started before the file was last written, and so runs an older version of it.
    `with` lists the processes of other pipelines that the same driver runs.
    """
    facts = report.facts
    began_ms, silent_ms = facts.get("began_ms"), now_ms - report.at_ms
    resident = facts.get("memory")
    return {
        "process": report.process,
        "instance": report.process.removeprefix(PREFIX + name).removeprefix(":"),
        "state": "silent" if is_silent(report, now_ms) else _driver_state(report, name),
        "pid": report.pid,
        "host": report.host,
        "older_than_file": isinstance(began_ms, int) and began_ms < changed_ms and report.host == this_process()[1],
        "age_s": (now_ms - began_ms) // 1000 if isinstance(began_ms, int) else None,
        "report_age_ms": max(0, silent_ms),
        "master": facts.get("master", ""),
        "tables": len(_table_facts(report)),
        "resident_bytes": resident.get("resident", (0, 0))[0] if isinstance(resident, dict) else 0,
        "with": processes_sharing_driver(report, reports, now_ms),
    }


def _driver_state(report: StatusReport, name: str) -> str:
    if any(mark.parked for mark in report.marks if mark.name == PREFIX + name):
        return "parked"
    return "starting" if report.facts.get("spark", "") == "" else "running"  # None: it uses no session


def _table_facts(report: StatusReport) -> dict[str, dict[str, Any]]:
    found = report.facts.get("tables")
    return found if isinstance(found, dict) else {}
