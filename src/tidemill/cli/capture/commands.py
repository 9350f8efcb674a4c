"""`tidemill capture`: the tables of captured databases, why a table is not captured, and how to resume it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.cli.context import (
    ConfigOption,
    JsonOption,
    OldForce,
    OpenStores,
    YesOption,
    confirm,
    either_name,
    open_stores,
    print_json,
)
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
def list_tables(capture: CaptureOption = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List tables with their state (captured, copying, parked, dropped, refused or skipped), replica identity, the
    reason for the state, and what to do about it."""
    with open_stores(config) as opened:
        rows = [row for row in opened.portal.call(opened.catalogue.all_tables()) if capture in ("", row.capture)]
        captures = opened.portal.call(opened.catalogue.list(CaptureRow))
    if as_json:
        print_json([captured_table_row(row) for row in rows])
        return
    for found in captures:
        if found.recopied and capture in ("", found.name):
            when = datetime.fromtimestamp(found.recopied_ms / 1000, UTC)
            print(f"{found.name:12} copied again at {when:%Y-%m-%d %H:%M:%S} UTC: {found.recopied}")
    for row in rows:
        at = f"  at {Lsn(row.paused_lsn)}" if row.paused_lsn else ""
        identity = f"  {row.identity}" if row.identity else ""
        asked = "  resnapshot requested" if row.recopy else ""
        print(f"{row.capture:12} {row.table:32} {shown_state(row):9}{identity}{at}{asked}")
        if row.copy is not None:
            print(f"    {row.copy.rows:,} rows, {row.copy.done} of {row.copy.count} chunks, are copied durably")
        if row.side_topic is not None:
            print(f"    {_side_topic_text(row.side_topic)}")
        if row.reason:
            print(f"    {row.reason} {row.fix}".rstrip())
        for relation, before in row.identities.values():
            print(f"    {relation} was set to REPLICA IDENTITY FULL; before, it had {before}")
        for relation, before in row.identities_asked.values():
            print(f"    {relation} had REPLICA IDENTITY {before} when an administrator was asked to set FULL")


@app.command("resnapshot")
@app.command("recopy", hidden=True)
def resnapshot(
    table: Annotated[str, typer.Argument(help="schema.table, as shown by `tidemill capture list`.")],
    capture: CaptureOption = "",
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy one table again into a new generation of its topic, while the other tables continue to stream.

    The pipelines' tables adopt the copy automatically if its columns are unchanged, were added or have wider types. A
    change that would lose data waits for `tidemill capture accept`.
    """
    from tidemill.capture.tables.recopy_requests import request_recopy

    with open_stores(config) as opened:
        row = find_table(opened, table, capture)
        rows = row.snapshot.rows if row.snapshot is not None else 0
        question = f"Copy {row.table} again ({rows:,} rows last time)? Its topic {row.topic} is deleted and re-created."
        confirm(question, yes=yes, as_json=as_json)
        row = opened.portal.call(request_recopy(opened.catalogue, row.capture, row.table))
    if as_json:
        print_json(captured_table_row(row))
    else:
        print(f"Capture {row.capture} starts to copy {row.table} again within seconds. See: tidemill capture list")


@app.command("accept")
def accept(
    table: Annotated[str, typer.Argument(help="schema.table, as shown by `tidemill capture list`.")],
    capture: CaptureOption = "",
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a table whose columns or key changed: it is copied again, and the pipelines' tables adopt the change.

    The command first shows the difference and the effect on each pipeline's table. A removed column stays in that
    table and is null from then on; a renamed column counts as one removed and one added. If a type changed incompatibly
    or the key changed, that table is re-created and its history ends.
    """
    from tidemill.cli.capture.accept import accept_table

    with open_stores(config) as opened:
        accept_table(opened, find_table(opened, table, capture), yes=yes, as_json=as_json)


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
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo everything that a capture created: publication, slot, replica identities, topics and rows.

    The pipelines' tables are kept, and so are the objects that an administrator created for a manual capture. The
    command is refused while the capture runs or a pipeline reads it. Statements that a lock prevented are printed; run
    the command again to execute them.
    """
    from tidemill.capture.config import CaptureConfig
    from tidemill.capture.session.teardown import drop_capture

    force = either_name(force, yes_really, "--force", "--yes-really")
    with open_stores(config) as opened:
        section = opened.config.capture.get(capture)
        dsn = dsn or (section.dsn if section is not None else "")
        if not dsn:
            raise InvalidError(
                f"no database is configured for this capture: capture={capture}.", fix="Add --dsn postgresql://…"
            )
        question = f"Drop capture {capture}, its publication, slot and topics? The pipelines' tables are kept."
        confirm(question, yes=yes or force, as_json=as_json)
        settings = CaptureConfig(name=capture, dsn=dsn, manual=section is not None and section.manual)
        done = opened.portal.call(drop_capture(settings, opened.catalogue, really=force))
    if as_json:
        print_json(msgspec.to_builtins(done))
    else:
        _print_drop_result(capture, done, section is not None)
    if done.left:
        raise UnavailableError(
            f"the capture is only partly dropped: capture={capture} left={len(done.left)}.", fix="Run it again."
        )


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
