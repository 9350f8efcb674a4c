"""`tidemill why NAME`: the chain from a table or a stage to its source, and what blocks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tidemill.base.config.config import Config
from tidemill.base.errors import MissingError, nearest_name
from tidemill.base.limits import FRESHNESS_BUDGET_MS
from tidemill.base.status.freshness import Verdict, resolve_status_name, verdict_of
from tidemill.base.status.status import DerivedStatus, lag_of, lag_text, severity_of, status_row
from tidemill.cli.captured_tables import maintain_line, tables_of_any_name
from tidemill.cli.cluster.status import Watch, read_stage_statuses, redraw_screen
from tidemill.cli.context import (
    EXIT_STUCK,
    OPEN_TIMEOUT_S,
    ConfigOption,
    OpenConsensus,
    open_consensus_only,
    open_stores,
)
from tidemill.cli.output.output import TABLE, Output
from tidemill.console.views.captures import shown_state
from tidemill.console.views.stages import verdict_row

Name = Annotated[
    str,
    typer.Argument(help="A stage, as shown by `tidemill status`, or a table. Default: the stage with the worst state."),
]


def why(name: Name = "", config: ConfigOption = None, watch: Watch = False, out: Output = TABLE) -> None:
    """Show how fresh a table is and what blocks it. Exit 0 fresh, 1 lagging, 3 stuck: the worst up to its source."""
    with open_consensus_only(config, OPEN_TIMEOUT_S) as opened:
        while watch:
            redraw_screen(lambda: _explain(name, config, opened, out))
        raise SystemExit(_explain(name, config, opened, out))


def _explain(name: str, config: Path | None, opened: OpenConsensus, out: Output) -> int:
    """Print the verdict, and return its exit code."""
    marks = read_stage_statuses(opened)
    note = ""
    try:
        start = resolve_status_name(marks, name) if name else max(marks, key=lambda n: severity_of(marks[n]))
    except KeyError:
        start, note = find_captured_table(config, name, marks)
    found = verdict_of(marks, start)
    silent = any(derived.report_age_ms > FRESHNESS_BUDGET_MS for derived in found.chain)
    holder = find_lock_intruder(opened.config) if silent else ""
    if holder:
        found = msgspec.structs.replace(found, root=holder)
    exit_code = EXIT_STUCK if holder else found.exit_code
    if out.is_text:
        print("\n".join([*([note] if note else []), *format_verdict(found, exit_code)]))
    else:
        answer = verdict_row(found, exit_code) | ({"note": note} if note else {})
        out.rows([status_row(derived) for derived in found.chain], value=answer)
    return exit_code


def find_captured_table(config: Path | None, name: str, marks: Mapping[str, DerivedStatus]) -> tuple[str, str]:
    """Return the stage that stands for a captured table without a stage, and a note about the table.

    Raises MissingError: the table is not captured, with the reason, or nothing has that name.
    """
    with open_stores(config) as opened:
        rows = tables_of_any_name(opened.portal.call(opened.catalogue.all_tables()), name)
    for row in rows:
        stage = f"capture:{row.capture}/topics"
        if row.state != "captured":
            state = f"the table is {shown_state(row)}: capture={row.capture} table={row.table}"
            raise MissingError(f"{state} reason: {row.reason}", fix=row.fix)
        if stage in marks:
            note = (
                f"{row.table} is {shown_state(row)} by {row.capture} into topic {row.topic}; no pipeline maintains it."
            )
            return stage, f"{note} To maintain it as a table, add to a pipeline: {maintain_line(row)}"
    near = nearest_name(name, [*marks, *(mark.partition(":")[2] for mark in marks)])
    hint = f"Did you mean {near}? " if near else ""
    raise MissingError(f"no such stage or table: name={name!r}.", fix=f"{hint}List them with: tidemill status")


def find_lock_intruder(config: Config) -> str:
    """Return the process that locks SQLite's file when the whole cluster is silent: no process could report it."""
    from tidemill.consensus.factory import sqlite_path_of_url
    from tidemill.consensus.sqlite.lock_holders import foreign_lock_holders

    file = sqlite_path_of_url(config.consensus_url)
    found = foreign_lock_holders(file) if file is not None else []
    return f"{found[0]}, which locks {file}" if found else ""


def format_verdict(found: Verdict, exit_code: int) -> list[str]:
    """Return the output lines: one per stage from the table to its source, then the blocker of the worst stage."""
    out = [
        ("  " * depth) + ("← " if depth else "") + format_stage(derived) for depth, derived in enumerate(found.chain)
    ]
    if exit_code:
        age_s = found.worst.standing_ms / 1000
        out.append(f"blocked by {found.root}: {found.worst.mark.name} is {found.worst.state} for {age_s:.1f} s")
    return out


def format_stage(derived: DerivedStatus) -> str:
    mark = derived.mark
    place = lag_text(mark) if lag_of(mark) is None else f"{lag_text(mark)} behind"
    tries = f" (try {mark.tries})" if mark.tries > 1 else ""
    holder = f", blocked by {mark.held_by}" if mark.held_by else ""
    reason = f": {mark.reason}{tries}" if mark.reason else ""
    return f"{mark.name}  {derived.state} for {derived.standing_ms / 1000:.1f} s, {place}{holder}{reason}"
