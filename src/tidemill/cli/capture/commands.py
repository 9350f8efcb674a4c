"""`tidemill capture`: the tables of captured databases, why a table is not captured, and how to resume it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.base.status.status import NODE, StatusReport, may_be_alive, process_exists, this_process
from tidemill.cli.context import (
    ConfigOption,
    DryRunOption,
    OldForce,
    OpenStores,
    YesOption,
    confirm,
    either_name,
    open_stores,
    preview,
)
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column
from tidemill.consensus.status.board import StatusBoard
from tidemill.console.captured_names import matching_tables
from tidemill.console.views.captures import captured_table_row, shown_state
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, SideTopicState

if TYPE_CHECKING:
    from tidemill.capture.session.teardown import TeardownResult

app = typer.Typer(
    help="List captured tables, copy one again, accept changed columns, or drop a capture.", no_args_is_help=True
)
CaptureOption = Annotated[
    str, typer.Option("--capture", help="Capture name; required if several captures have the table.")
]


@app.command("list")
def list_tables(capture: CaptureOption = "", config: ConfigOption = None, out: Output = TABLE) -> None:
    """List tables with their state (captured, copying, parked, dropped, refused or skipped), replica identity, the
    reason for the state, and what to do about it."""
    with open_stores(config) as opened:
        rows = [row for row in opened.portal.call(opened.catalogue.all_tables()) if capture in ("", row.capture)]
        captures = opened.portal.call(opened.catalogue.list(CaptureRow))
    fields = [captured_table_row(row) | {"state": shown_state(row)} for row in rows]
    if not out.is_text:
        out.rows([captured_table_row(row) for row in rows])
        return
    notes = {(row.capture, row.table): "; ".join(_table_notes(row)) for row in rows}
    columns = [Column(name) for name in ("capture", "table", "state", "identity")]
    columns += [Column("at", "parked_at"), Column("note", lambda row: notes[row["capture"], row["table"]])]
    out.rows(fields, columns, empty="no captured tables")
    for found in captures:
        if found.recopied and capture in ("", found.name):
            when = datetime.fromtimestamp(found.recopied_ms / 1000, UTC)
            print(f"{found.name} was copied again at {when:%Y-%m-%d %H:%M:%S} UTC: {found.recopied}")


def _table_notes(row: CaptureTableRow) -> Iterator[str]:
    if row.reason:
        yield f"{row.reason} {row.fix}".rstrip()
    if row.recopy:
        yield "resnapshot requested"
    if row.copy is not None:
        yield f"{row.copy.rows:,} rows, {row.copy.done} of {row.copy.count} chunks, are copied durably"
    if row.side_topic is not None:
        yield _side_topic_text(row.side_topic)
    for relation, before in row.identities.values():
        yield f"{relation} was set to REPLICA IDENTITY FULL; before, it had {before}"
    for relation, before in row.identities_asked.values():
        yield f"{relation} had REPLICA IDENTITY {before} when an administrator was asked to set FULL"


@app.command("resnapshot")
@app.command("recopy", hidden=True)
def resnapshot(
    table: Annotated[str, typer.Argument(help="schema.table, as shown by `tidemill capture list`.")],
    capture: CaptureOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Copy one table again into a new generation of its topic, while the other tables continue to stream.

    The pipelines' tables adopt the copy automatically if its columns are unchanged, were added or have wider types. A
    change that would lose data waits for `tidemill capture accept`.
    """
    from tidemill.capture.tables.recopy_requests import check_captured, request_recopy

    with open_stores(config) as opened:
        row = find_table(opened, table, capture)
        check_captured(row)
        rows = row.snapshot.rows if row.snapshot is not None else 0
        if dry_run:
            what = f"copy {row.table} again ({rows:,} rows last time); its topic {row.topic} is deleted and re-created"
            preview(out, {"capture": row.capture, "table": row.table, "topic": row.topic, "rows_copied": rows}, what)
            return
        question = f"Copy {row.table} again ({rows:,} rows last time)? Its topic {row.topic} is deleted and re-created."
        confirm(question, yes=yes, out=out)
        row = opened.portal.call(request_recopy(opened.catalogue, row.capture, row.table))
    said = f"Capture {row.capture} starts to copy {row.table} again within seconds. See: tidemill capture list"
    out.one(captured_table_row(row), said)


@app.command("accept")
def accept(
    table: Annotated[str, typer.Argument(help="schema.table, as shown by `tidemill capture list`.")],
    capture: CaptureOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Resume a table whose columns or key changed: it is copied again, and the pipelines' tables adopt the change.

    The command first shows the difference and the effect on each pipeline's table. A removed column stays in that
    table and is null from then on; a renamed column counts as one removed and one added. If a type changed incompatibly
    or the key changed, that table is re-created and its history ends.
    """
    from tidemill.cli.capture.accept import accept_table

    with open_stores(config) as opened:
        accept_table(opened, find_table(opened, table, capture), yes=yes, dry_run=dry_run, out=out)


@app.command("drop")
def drop(
    capture: Annotated[str, typer.Argument(help="Name of the capture in tidemill.toml.")],
    dsn: Annotated[
        str, typer.Option("--dsn", help="URL of its database, if tidemill.toml no longer contains it.")
    ] = "",
    yes: YesOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drop it even if a pipeline reads it or it belongs to another cluster.")
    ] = False,
    yes_really: OldForce = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Undo everything that a capture created: publication, slot, replica identities, topics and rows.

    The pipelines' tables are kept, and so are the objects that an administrator created for a manual capture. The
    command is refused while a node runs the capture (stop the node first) or a pipeline reads it. Statements that a
    lock prevented are printed; run the command again to execute them.
    """
    from tidemill.capture.config import CaptureConfig
    from tidemill.capture.session.teardown import drop_capture, plan_drop

    force = either_name(force, yes_really, "--force", "--yes-really")
    with open_stores(config) as opened:
        _require_no_live_node(opened, capture)
        section = opened.config.capture.get(capture)
        dsn = dsn or (section.dsn if section is not None else "")
        if not dsn:
            raise InvalidError(
                f"no database is configured for this capture: capture={capture}.", fix="Add --dsn postgresql://…"
            )
        settings = CaptureConfig(name=capture, dsn=dsn, manual=section is not None and section.manual)
        if dry_run:
            plan = opened.portal.call(plan_drop(settings, opened.catalogue, really=force))
            _print_drop_plan(capture, plan, out)
            return
        question = f"Drop capture {capture}, its publication, slot and topics? The pipelines' tables are kept."
        confirm(question, yes=yes or force, out=out)
        done = opened.portal.call(drop_capture(settings, opened.catalogue, really=force))
    if out.is_text:
        _print_drop_result(capture, done, section is not None)
    else:
        row = msgspec.to_builtins(done)
        out.rows([row], value=row)
    if done.left:
        raise UnavailableError(
            f"the capture is only partly dropped: capture={capture} left={len(done.left)}.", fix="Run it again."
        )


def _require_no_live_node(opened: OpenStores, capture: str) -> None:
    """Raise ConflictError if a node reports the capture and is live, or is restarted by its supervisor. Between two
    sessions it does not hold the capture's lock, but the next session would create again what is dropped."""
    from tidemill.capture.session.teardown import stop_first

    reports = opened.portal.call(StatusBoard(opened.consensus, opened.rand).reports())
    now_ms = opened.clock.now_ms()
    live = [r for r in reports if may_be_alive(r, now_ms) and not _has_ended(r)]
    restarted = {mark.name for report in live for mark in report.marks if mark.name.startswith(NODE)}
    for report in reports:
        reported = report.process.startswith(NODE) and any(mark.name == f"capture:{capture}" for mark in report.marks)
        if reported and ((report in live and not report.left) or report.process in restarted):
            node = report.process.removeprefix(NODE)
            raise ConflictError(
                f"the capture is running: capture={capture} node={node} pid={report.pid} host={report.host}.",
                fix=stop_first(capture),
            )


def _has_ended(report: StatusReport) -> bool:
    """Return whether the process of a report is known to be gone: on this machine, pids show it."""
    return report.host == this_process()[1] and not process_exists(report.pid)


def _print_drop_plan(capture: str, plan: TeardownResult, out: Output) -> None:
    if not out.is_text:
        preview(out, msgspec.to_builtins(plan), "")
        return
    print(f"dry run: drop capture {capture}; the pipelines' tables are kept")
    kept = "keep the publication: not created by this capture" if plan.publication_left else "no publication"
    print("drop the publication" if plan.publication else kept)
    print("drop the replication slot" if plan.slot else "no replication slot")
    for relation, before in plan.identities.items():
        print(f"set {relation} to REPLICA IDENTITY {before}")
    for topic in plan.topics:
        print(f"delete topic {topic}")
    for statement, why in plan.for_administrator.items():
        print(f"for an administrator: {statement}; -- {why}")


def _print_drop_result(capture: str, done: TeardownResult, configured: bool) -> None:
    kept = "kept: not created by this capture" if done.publication_left else "already gone"
    print(f"publication {'dropped' if done.publication else kept}, slot {'dropped' if done.slot else 'already gone'}")
    for relation, before in done.identities.items():
        print(f"{relation} has REPLICA IDENTITY {before} again")
    for topic in done.topics:
        print(f"topic {topic} deleted")
    for statement, why in done.for_administrator.items():
        print(f"for an administrator: {statement}; -- {why}")
    for statement, why in done.left.items():
        print(f"not done: {statement}; -- {why}")
    if configured and not done.left:
        print(f"Remove [capture.{capture}] from tidemill.toml, or the next `tidemill up` captures the database again.")


def find_table(opened: OpenStores, table: str, capture: str) -> CaptureTableRow:
    """Return the one captured table of that name. Raises MissingError without a match, InvalidError if several
    captures have it."""
    rows = matching_tables(opened.portal.call(opened.catalogue.all_tables()), table, capture)
    if not rows:
        raise MissingError(f"no such captured table: table={table}.", fix="See tidemill capture list.")
    if len(rows) > 1:
        captures = ",".join(row.capture for row in rows)
        raise InvalidError(
            f"several captures have this table: table={table} captures={captures}.", fix="Add --capture NAME."
        )
    return rows[0]


def _side_topic_text(side_topic: SideTopicState) -> str:
    """Describe the side topic: changes that arrived during the table's copy, as of a few seconds ago."""
    said = (
        f"{side_topic.records:,} changes ({side_topic.bytes / 2**20:,.1f} MiB) in the side topic,"
        f" {side_topic.appended:,} of them appended to the topic"
    )
    return f"{said}; WAL is retained from {Lsn(side_topic.until_lsn)}" if side_topic.until_lsn else said
