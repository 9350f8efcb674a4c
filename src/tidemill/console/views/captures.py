"""Captured databases and their tables. A table's row is what `capture list` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.base.lsn import Lsn
from tidemill.base.status.status import DerivedStatus, StatusReport
from tidemill.console.views.sentences import describe_name, describe_state

if TYPE_CHECKING:
    from tidemill.metastore.rows.captures import CaptureTableRow

COPIES_MAX = 20
TROUBLED_MAX = 20
"""Copies and uncaptured tables that the row of one capture lists; it counts the others."""
_SLOT_FACTS = (
    "slot", "slot_wal_status", "confirmed_lsn",
    "slot_retained_bytes", "slot_grows_bytes_per_s", "slot_headroom_bytes", "slot_full_in_s", "slot_pinned_bytes",
    "slot_pinned_by", "backlog_bytes", "queue_changes",
)  # fmt: skip


def captured_table_row(row: CaptureTableRow) -> dict[str, object]:
    """Return one row of `capture list`."""
    return {
        "capture": row.capture,
        "table": row.table,
        "topic": row.topic,
        "state": "skipped" if row.state == "left" else row.state,
        "copied": row.snapshot is not None,
        "rows_copied": row.snapshot.rows if row.snapshot is not None else None,
        "copy_rows": row.copy.rows if row.copy is not None else None,
        "copy_chunks_done": row.copy.done if row.copy is not None else None,
        "copy_chunks": row.copy.count if row.copy is not None else None,
        "set_aside_records": row.side_topic.records if row.side_topic is not None else None,
        "set_aside_bytes": row.side_topic.bytes if row.side_topic is not None else None,
        "set_aside_appended": row.side_topic.appended if row.side_topic is not None else None,
        "wal_kept_since": str(Lsn(row.side_topic.until_lsn))
        if row.side_topic is not None and row.side_topic.until_lsn
        else None,
        "generation": row.generation,
        "envelope": row.envelope,
        "reason": row.reason,
        "fix": row.fix,
        "parked_at": str(Lsn(row.paused_lsn)) if row.paused_lsn else None,
        "since_ms": row.since_ms,
        "recopy": row.recopy,
        "again_at_ms": row.again_ms or None,
        "identity": row.identity,
        "identities_before": dict([*row.identities_asked.values(), *row.identities.values()]),
        "columns": [[c.name, c.type_name, c.key_index] for c in row.columns],
    }


def shown_state(row: CaptureTableRow) -> str:
    """Return the state as users read it: a table being copied, and one that is skipped, have no state of their own in
    the catalogue."""
    if row.state == "captured" and row.snapshot is None:
        return "copying"
    return "skipped" if row.state == "left" else row.state


def capture_rows(
    tables: Sequence[CaptureTableRow], marks: Mapping[str, DerivedStatus], reports: Iterable[StatusReport]
) -> list[dict[str, Any]]:
    """Return one row for each captured database: its state, its slot, its tables by state, and its copies."""
    facts = _facts_by_capture(reports)
    by_capture: dict[str, list[CaptureTableRow]] = {name: [] for name in facts}
    for table in tables:
        by_capture.setdefault(table.capture, []).append(table)
    for name in marks:
        if name.startswith("capture:") and "/" not in name and "@" not in name:
            by_capture.setdefault(name.removeprefix("capture:"), [])
    return [_capture_row(name, by_capture[name], marks, facts.get(name, {})) for name in sorted(by_capture)]


def _capture_row(
    name: str, tables: Sequence[CaptureTableRow], marks: Mapping[str, DerivedStatus], facts: Mapping[str, Any]
) -> dict[str, Any]:
    derived = marks.get(f"capture:{name}")
    copying = [table for table in tables if shown_state(table) == "copying"]
    troubled = [table for table in tables if table.state != "captured" or table.reason]
    return {
        "capture": name,
        "state": str(derived.state) if derived is not None else "",
        "sentence": describe_state(derived) if derived is not None else "No process reports this capture.",
        "held_by": describe_name(derived.blocker) if derived is not None and derived.blocker else "",
        "standing_ms": derived.standing_ms if derived is not None else 0,
        "process": derived.process if derived is not None else "",
        "slot": {key: facts.get(key) for key in _SLOT_FACTS},
        "tables": dict(sorted(Counter(shown_state(table) for table in tables).items())),
        "copies": [_copy_row(table, marks) for table in copying[:COPIES_MAX]],
        "copies_count": len(copying),
        "troubled": [
            {"table": t.table, "state": shown_state(t), "reason": t.reason, "fix": t.fix}
            for t in troubled[:TROUBLED_MAX]
        ],
        "troubled_count": len(troubled),
    }


def _copy_row(table: CaptureTableRow, marks: Mapping[str, DerivedStatus]) -> dict[str, Any]:
    """Return the progress of a table's copy: of its status while it is reported, else of what is durable."""
    derived = marks.get(f"table:{table.capture}/{table.table}")
    return {
        "table": table.table,
        "rows": derived.mark.position if derived is not None else table.copy.rows if table.copy is not None else 0,
        "rows_expected": derived.mark.target if derived is not None else None,
        "chunks_done": table.copy.done if table.copy is not None else None,
        "chunks": table.copy.count if table.copy is not None else None,
        "sentence": derived.mark.reason if derived is not None else "",
        "state": str(derived.state) if derived is not None else "",
    }


def _facts_by_capture(reports: Iterable[StatusReport]) -> dict[str, Mapping[str, Any]]:
    """Return the facts of each capture; those of the newest report count, because a capture may have moved."""
    found: dict[str, Mapping[str, Any]] = {}
    for report in sorted(reports, key=lambda each: each.at_ms):
        for name, facts in report.facts.items():
            if name.startswith("capture:") and isinstance(facts, dict):
                found[name.removeprefix("capture:")] = facts
    return found
