"""State of all pipelines, from the configuration, the catalogue, the shards and the reports of their drivers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import DerivedStatus, StageState, StatusReport, derive_statuses, lag_of, this_process
from tidemill.cli.context import OpenStores
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.node.supervise.driver_instances import processes_sharing_driver

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


def driver_reports(reports: list[StatusReport], name: str) -> list[StatusReport]:
    """Return the reports of the drivers of one pipeline, silent ones included."""
    own = PREFIX + name
    return [r for r in reports if r.process == own or r.process.startswith(f"{own}:")]


def read_driver_reports(opened: OpenStores, name: str) -> list[StatusReport]:
    return driver_reports(opened.portal.call(StatusBoard(opened.consensus, opened.rand).reports()), name)


def read_pipeline_views(opened: OpenStores) -> dict[str, PipelineView]:
    """Return the view of every pipeline that is configured, in the catalogue, or reporting. Raises the errors of the
    stores."""
    from tidemill.shards.registry import read_shards

    portal, now_ms = opened.portal, opened.clock.now_ms()
    reports = portal.call(StatusBoard(opened.consensus, opened.rand).reports())
    rows = {row.name: row for row in portal.call(opened.catalogue.list(PipelineRow))}
    shards = {state.name: state for state in portal.call(read_shards(opened.consensus))}
    marks = derive_statuses(reports, now_ms)
    reporting = {r.process.split(":")[1] for r in reports if r.process.startswith(PREFIX)}
    out = {}
    for name in sorted({*opened.config.pipeline, *rows, *reporting}):
        mine = driver_reports(reports, name)
        view = out[name] = PipelineView(name)
        section, row = opened.config.pipeline.get(name), rows.get(name)
        view.file = section.file if section is not None else ""
        changed_ms = _file_modified_ms(view.file)
        view.instances = [_instance_fields(report, name, reports, now_ms, changed_ms) for report in mine]
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
    name: str, fed_by: str, upper: int, stored: int, mark: DerivedStatus | None, reports: list[StatusReport]
) -> dict[str, Any]:
    """Return one row of `tables`.

    `lag_ms` is how much newer than the table its inputs are; None while the table has no time or no process reports it.
    `rows` counts what the reporting drivers wrote since they started, `updates` what the shard stores. `seats` lists
    the processes in which the table takes part.
    """
    is_reported = mark is not None and mark.state is not StageState.BLIND
    facts = {r.process: _table_facts(r)[name] for r in reports if name in _table_facts(r)}
    return {
        "table": name,
        "input": fed_by,
        "upper": upper,
        "state": str(mark.state) if mark is not None else "",
        "lag_ms": lag_of(replace(mark.mark, position=max(upper, mark.mark.position))) if mark and is_reported else None,
        "held_by": mark.mark.held_by if mark is not None else "",
        "reason": mark.mark.reason if mark is not None else "",
        "updates": stored,
        "rows": sum(int(fact.get("rows", 0)) for fact in facts.values()),
        "won": sum(int(fact.get("won", 0)) for fact in facts.values()),
        "lost": sum(int(fact.get("lost", 0)) for fact in facts.values()),
        "seats": sorted(facts),
    }


def _derived_table_fields(name: str, inputs: dict[str, tuple[str, ...]], reports: list[StatusReport]) -> dict[str, Any]:
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
        (_table_facts(r)[name] for r in reports if _table_facts(r).get(name, {}).get("recomputed")),
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


def format_derived_table(table: dict[str, Any]) -> str:
    """Describe how a derived table is maintained, and why."""
    groups, because = table["last_groups"], table["last_whole_why"]
    last = "" if groups is None else f"; last round {'whole' if groups < 0 else f'{groups:,} groups'}"
    return f"{table['maintained']}: {table['maintained_why']}{last}" + (f", because of {because}" if because else "")


def _file_modified_ms(file: str) -> int:
    """Return when the pipeline's file was last written, if this machine has the file; otherwise 0."""
    try:
        return os.stat(file).st_mtime_ns // 1_000_000 if file else 0
    except OSError:
        return 0


def _instance_fields(
    report: StatusReport, name: str, reports: list[StatusReport], now_ms: int, changed_ms: int = 0
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
        "state": "silent" if silent_ms > STATUS_BLIND_AFTER_MS else _driver_state(report, name),
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
    return "running" if report.facts.get("spark") else "starting"


def _table_facts(report: StatusReport) -> dict[str, dict[str, Any]]:
    found = report.facts.get("tables")
    return found if isinstance(found, dict) else {}


def format_lag(lag_ms: int | None) -> str:
    return "unknown" if lag_ms is None else f"{lag_ms} ms"


def format_table(table: dict[str, Any]) -> str:
    held = f"  blocked by {table['held_by']}" if table["held_by"] else ""
    reason = f": {table['reason']}" if table["reason"] else ""
    made_of = ", ".join(table["inputs"]) if "inputs" in table else table["input"]
    return (
        f"{table['table']} ← {made_of}  upper={table['upper']}  {table['state'] or 'not reported'}"
        f"  lag={format_lag(table['lag_ms'])}  rows={table['rows']:,}  updates={table['updates']:,}"
        f"  seats={len(table['seats'])}{held}{reason}"
    )


def format_instance(instance: dict[str, Any]) -> str:
    age = f"  age {instance['age_s']} s" if instance["age_s"] is not None else ""
    silent = f" for {instance['report_age_ms'] // 1000} s" if instance["state"] == "silent" else ""
    older = "  older than its file: restart it with `tidemill pipeline restart`" if instance["older_than_file"] else ""
    shared = f"  shared with {', '.join(instance['with'])}" if instance["with"] else ""
    return (
        f"{instance['process']}  {instance['state']}{silent}  pid {instance['pid']} on {instance['host']}{age}"
        f"  tables={instance['tables']}  {instance['master']}".rstrip()
        + shared
        + older
    )
