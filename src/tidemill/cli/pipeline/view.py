"""State of all pipelines, from the configuration, the catalogue, the shards and the reports of their drivers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from tidemill.base.limits import MARK_BLIND_AFTER_MS
from tidemill.base.status.status import Derived, Report, State, behind, derive_all, this_process
from tidemill.cli.context import Stores
from tidemill.consensus.status.board import Board
from tidemill.metastore.catalogue import PipelineRow
from tidemill.node.supervise.driver_instances import beside

PREFIX = "pipeline:"


@dataclass
class View:
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
        lags = [table["lag_ms"] for table in self.tables]
        return {
            "pipeline": self.name,
            "file": self.file,
            "running": len(states) - states.count("silent") - states.count("parked"),
            "silent": states.count("silent"),
            "parked": states.count("parked"),
            "tables": [table["table"] for table in self.tables],
            "lag_ms": None if None in lags else max(lags, default=0),
            "dead_letters": self.dead_letters,
        }


def reports_of(reports: list[Report], name: str) -> list[Report]:
    """Return the reports of the drivers of one pipeline, silent ones included."""
    own = PREFIX + name
    return [r for r in reports if r.process == own or r.process.startswith(f"{own}:")]


def instances_of(opened: Stores, name: str) -> list[Report]:
    return reports_of(opened.portal.call(Board(opened.consensus, opened.rand).reports()), name)


def read_view(opened: Stores) -> dict[str, View]:
    """Return the view of every pipeline that is configured, in the catalogue, or reporting. Raises the errors of the
    stores."""
    from tidemill.shards.registry import read_shards

    portal, now_ms = opened.portal, opened.clock.now_ms()
    reports = portal.call(Board(opened.consensus, opened.rand).reports())
    rows = {row.name: row for row in portal.call(opened.catalogue.list(PipelineRow))}
    shards = {state.name: state for state in portal.call(read_shards(opened.consensus))}
    marks = derive_all(reports, now_ms)
    reporting = {r.process.split(":")[1] for r in reports if r.process.startswith(PREFIX)}
    out = {}
    for name in sorted({*opened.config.pipeline, *rows, *reporting}):
        mine = reports_of(reports, name)
        view = out[name] = View(name)
        section, row = opened.config.pipeline.get(name), rows.get(name)
        view.file = section.file if section is not None else ""
        changed_ms = _changed_ms(view.file)
        view.instances = [_instance(report, name, reports, now_ms, changed_ms) for report in mine]
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
                found |= _derived(table, row.derived[table], mine)
            view.tables.append(found)
    return out


def table_row(
    name: str, fed_by: str, upper: int, stored: int, mark: Derived | None, reports: list[Report]
) -> dict[str, Any]:
    """Return one row of `tables`.

    `lag_ms` is how much newer than the table its inputs are; None while the table has no time or no process reports it.
    `rows` counts what the reporting drivers wrote since they started, `updates` what the shard stores. `seats` lists
    the processes in which the table takes part.
    """
    told = mark is not None and mark.state is not State.BLIND
    facts = {r.process: _tables(r)[name] for r in reports if name in _tables(r)}
    return {
        "table": name,
        "input": fed_by,
        "upper": upper,
        "state": str(mark.state) if mark is not None else "",
        "lag_ms": behind(replace(mark.mark, position=max(upper, mark.mark.position))) if mark and told else None,
        "held_by": mark.mark.held_by if mark is not None else "",
        "reason": mark.mark.reason if mark is not None else "",
        "updates": stored,
        "rows": sum(int(fact.get("rows", 0)) for fact in facts.values()),
        "won": sum(int(fact.get("won", 0)) for fact in facts.values()),
        "lost": sum(int(fact.get("lost", 0)) for fact in facts.values()),
        "seats": sorted(facts),
    }


def _derived(name: str, inputs: dict[str, tuple[str, ...]], reports: list[Report]) -> dict[str, Any]:
    """Return the additional fields of a derived table.

    `inputs` maps each input to the columns that group it. `maintained` is `by group` or `whole`, with the reason.
    `last_groups` is how many groups the last round of a reporting driver computed, with the reason: −1 means all, None
    means no round yet.
    """
    by = [f"{i} ({', '.join(columns)})" for i, columns in inputs.items() if columns]
    whole = [i for i, columns in inputs.items() if not columns]
    why = f"by=… groups by {', '.join(by)}" if by else "no by=… names the columns to group by"
    if by and whole:
        why += f"; a change in {', '.join(whole)}, which is read whole, recomputes everything"
    last = max(
        (_tables(r)[name] for r in reports if _tables(r).get(name, {}).get("recomputed")),
        key=lambda fact: int(fact["recomputed"]),
        default={},
    )
    return {
        "inputs": {i: list(columns) for i, columns in inputs.items()},
        "maintained": "by group" if by else "whole",
        "maintained_why": why,
        "last_groups": last.get("groups"),
        "last_whole_why": last.get("whole_because", ""),
    }


def derived_line(table: dict[str, Any]) -> str:
    """Describe how a derived table is maintained, and why."""
    groups, because = table["last_groups"], table["last_whole_why"]
    last = "" if groups is None else f"; last round {'whole' if groups < 0 else f'{groups:,} groups'}"
    return f"{table['maintained']}: {table['maintained_why']}{last}" + (f", because of {because}" if because else "")


def _changed_ms(file: str) -> int:
    """Return when the pipeline's file was last written, if this machine has the file; otherwise 0."""
    try:
        return os.stat(file).st_mtime_ns // 1_000_000 if file else 0
    except OSError:
        return 0


def _instance(report: Report, name: str, reports: list[Report], now_ms: int, changed_ms: int = 0) -> dict[str, Any]:
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
        "state": "silent" if silent_ms > MARK_BLIND_AFTER_MS else _living(report, name),
        "pid": report.pid,
        "host": report.host,
        "older_than_file": isinstance(began_ms, int) and began_ms < changed_ms and report.host == this_process()[1],
        "age_s": (now_ms - began_ms) // 1000 if isinstance(began_ms, int) else None,
        "report_age_ms": max(0, silent_ms),
        "master": facts.get("master", ""),
        "tables": len(_tables(report)),
        "resident_bytes": resident.get("resident", (0, 0))[0] if isinstance(resident, dict) else 0,
        "with": beside(report, reports, now_ms),
    }


def _living(report: Report, name: str) -> str:
    if any(mark.parked for mark in report.marks if mark.name == PREFIX + name):
        return "parked"
    return "running" if report.facts.get("spark") else "starting"


def _tables(report: Report) -> dict[str, dict[str, Any]]:
    found = report.facts.get("tables")
    return found if isinstance(found, dict) else {}


def lag_text(lag_ms: int | None) -> str:
    return "unknown" if lag_ms is None else f"{lag_ms} ms"


def table_line(table: dict[str, Any]) -> str:
    held = f"  blocked by {table['held_by']}" if table["held_by"] else ""
    reason = f": {table['reason']}" if table["reason"] else ""
    made_of = ", ".join(table["inputs"]) if "inputs" in table else table["input"]
    return (
        f"{table['table']} ← {made_of}  upper={table['upper']}  {table['state'] or 'not reported'}"
        f"  lag={lag_text(table['lag_ms'])}  rows={table['rows']:,}  updates={table['updates']:,}"
        f"  seats={len(table['seats'])}{held}{reason}"
    )


def instance_line(instance: dict[str, Any]) -> str:
    age = f"  age {instance['age_s']} s" if instance["age_s"] is not None else ""
    silent = f" for {instance['report_age_ms'] // 1000} s" if instance["state"] == "silent" else ""
    older = "  older than its file: restart it with `tidemill pipeline restart`" if instance["older_than_file"] else ""
    beside = f"  shared with {', '.join(instance['with'])}" if instance["with"] else ""
    return (
        f"{instance['process']}  {instance['state']}{silent}  pid {instance['pid']} on {instance['host']}{age}"
        f"  tables={instance['tables']}  {instance['master']}".rstrip()
        + beside
        + older
    )
