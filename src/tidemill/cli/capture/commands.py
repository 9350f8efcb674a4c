"""`tidemill capture`: the tables of captured databases, why one is not captured, and the way out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.cli.context import ConfigOption, JsonOption, Stores, print_json, stores
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, SetAside

if TYPE_CHECKING:
    from tidemill.capture.session.teardown import TakenBack

app = typer.Typer(
    help="List captured tables; copy one again; accept its new columns; take a capture back.", no_args_is_help=True
)
CaptureOption = Annotated[str, typer.Option("--capture", help="Which capture; needed where several have the table.")]


@app.command("list")
def list_tables(capture: CaptureOption = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the tables: captured, parked, dropped, refused or left out, with the replica identity in use, the reason and
    what to do about it."""
    with stores(config) as opened:
        rows = [row for row in opened.portal.call(opened.catalogue.all_tables()) if capture in ("", row.capture)]
        captures = opened.portal.call(opened.catalogue.list(CaptureRow))
    if as_json:
        print_json([_described(row) for row in rows])
        return
    for found in captures:
        if found.recopied and capture in ("", found.name):
            when = datetime.fromtimestamp(found.recopied_ms / 1000, UTC)
            print(f"{found.name:12} copied again at {when:%Y-%m-%d %H:%M:%S} UTC: {found.recopied}")
    for row in rows:
        state = "copying" if row.state == "captured" and row.snapshot is None else row.state
        at = f"  at {Lsn(row.parked_lsn)}" if row.parked_lsn else ""
        identity = f"  {row.identity}" if row.identity else ""
        print(f"{row.capture:12} {row.table:32} {state:9}{identity}{at}{'  recopy asked' if row.recopy else ''}")
        if row.copy is not None:
            print(f"    {row.copy.rows:,} rows, {row.copy.done} of {row.copy.count} chunks, are copied for good")
        if row.aside is not None:
            print(f"    {_aside(row.aside)}")
        if row.reason:
            print(f"    {row.reason} {row.fix}".rstrip())
        for relation, before in row.identities.values():
            print(f"    {relation} was given REPLICA IDENTITY FULL; it had {before}")
        for relation, before in row.identities_asked.values():
            print(f"    {relation} had REPLICA IDENTITY {before} when an administrator was asked to give it FULL")


@app.command("recopy")
def recopy(
    table: Annotated[str, typer.Argument(help="schema.table, as `tidemill capture list` names it.")],
    capture: CaptureOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy one table again, beside the stream of the others, into a new generation of its topic.

    Its shards take it over by themselves when its columns are as they were, or have become more or wider; what would
    lose something waits (tidemill capture accept).
    """
    from tidemill.capture.tables.recopy_requests import ask

    with stores(config) as opened:
        row = find_table(opened, table, capture)
        if not yes:
            _confirm(row)
        row = opened.portal.call(ask(opened.catalogue, row.capture, row.table))
    if as_json:
        print_json(_described(row))
    else:
        print(f"{row.table} is copied again by capture {row.capture} within seconds. See: tidemill capture list")


@app.command("accept")
def accept(
    table: Annotated[str, typer.Argument(help="schema.table, as `tidemill capture list` names it.")],
    capture: CaptureOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a table whose columns or key changed go on as it is now: it is copied again, and its shards take that over.

    First the difference is shown, and what becomes of each shard. A column that is gone stays in the shard, null from
    then on; a renamed one is that and a new column. Where a type or the key is another the shard is made anew, and its
    history ends.
    """
    from tidemill.cli.capture.accept import accept_one

    with stores(config) as opened:
        accept_one(opened, find_table(opened, table, capture), yes=yes, as_json=as_json)


@app.command("drop")
def drop(
    capture: Annotated[str, typer.Argument(help="The capture's name in tidemill.toml.")],
    dsn: Annotated[
        str, typer.Option("--dsn", help="Its database, where tidemill.toml does not name it any more.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    really: Annotated[
        bool, typer.Option("--yes-really", help="Though a pipeline reads it, or its cluster is another.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take back all that a capture made: publication, slot, the identities of tables, topics, rows. What an
    administrator made for a manual one stays.

    Shards stay. Refused while the capture runs and while a pipeline reads it. What a lock kept from being taken back
    is printed as statements, and done by the next try.
    """
    from tidemill.capture.config import CaptureConfig
    from tidemill.capture.session.teardown import take_back

    with stores(config) as opened:
        section = opened.config.capture.get(capture)
        dsn = dsn or (section.dsn if section is not None else "")
        if not dsn:
            raise InvalidError(f"its database is not known: capture={capture}.", fix="Add --dsn postgresql://…")
        if not yes and not really:
            question = f"Drop capture {capture}, its publication, slot and topics? Its shards stay."
            if not typer.confirm(question):
                raise InvalidError("nothing was done.", fix="Answer y, or add --yes.")
        settings = CaptureConfig(name=capture, dsn=dsn, manual=section is not None and section.manual)
        done = opened.portal.call(take_back(settings, opened.catalogue, really=really))
    if as_json:
        print_json(msgspec.to_builtins(done))
    else:
        _tell_taken_back(capture, done, section is not None)
    if done.left:
        raise UnavailableError(f"not all is taken back: capture={capture} left={len(done.left)}.", fix="Run it again.")


def _tell_taken_back(capture: str, done: TakenBack, configured: bool) -> None:
    kept = "left, not ours" if done.publication_left else "was gone"
    print(f"publication {'dropped' if done.publication else kept}, slot {'dropped' if done.slot else 'was gone'}")
    for relation, before in done.identities.items():
        print(f"{relation} has REPLICA IDENTITY {before} again")
    for topic in done.topics:
        print(f"topic {topic} deleted")
    for statement, why in done.for_administrator.items():
        print(f"for an administrator: {statement}; -- {why}")
    for statement, why in done.left.items():
        print(f"not done: {statement}; -- {why}")
    if configured and not done.left:
        print(f"Take [capture.{capture}] out of tidemill.toml: the next `tidemill up` captures it again.")


def find_table(opened: Stores, table: str, capture: str) -> CaptureTableRow:
    from tidemill.capture.naming import split_name, table_name

    name = table_name(*split_name(table))
    rows = [
        row
        for row in opened.portal.call(opened.catalogue.all_tables())
        if row.table in (name, table) and capture in ("", row.capture)
    ]
    if not rows:
        raise MissingError(f"no such captured table: table={name}.", fix="See tidemill capture list.")
    if len(rows) > 1:
        captures = ",".join(row.capture for row in rows)
        raise InvalidError(
            f"several captures have this table: table={name} captures={captures}.", fix="Add --capture NAME."
        )
    return rows[0]


def _confirm(row: CaptureTableRow) -> None:
    rows = row.snapshot.rows if row.snapshot is not None else 0
    question = f"Copy {row.table} again ({rows:,} rows last time)? Its topic {row.topic} is deleted and made anew."
    if not typer.confirm(question):
        raise InvalidError("nothing was done.", fix="Answer y, or add --yes.")


def _aside(aside: SetAside) -> str:
    """What changed during a table's copy, as of a few seconds ago."""
    said = (
        f"{aside.records:,} changes ({aside.bytes / 2**20:,.1f} MiB) are set aside, {aside.appended:,} of them appended"
    )
    return f"{said}; WAL is kept since {Lsn(aside.until_lsn)}" if aside.until_lsn else said


def _described(row: CaptureTableRow) -> dict[str, object]:
    return {
        "capture": row.capture,
        "table": row.table,
        "topic": row.topic,
        "state": row.state,
        "copied": row.snapshot is not None,
        "rows_copied": row.snapshot.rows if row.snapshot is not None else None,
        "copy_rows": row.copy.rows if row.copy is not None else None,
        "copy_chunks_done": row.copy.done if row.copy is not None else None,
        "copy_chunks": row.copy.count if row.copy is not None else None,
        "set_aside_records": row.aside.records if row.aside is not None else None,
        "set_aside_bytes": row.aside.bytes if row.aside is not None else None,
        "set_aside_appended": row.aside.appended if row.aside is not None else None,
        "wal_kept_since": str(Lsn(row.aside.until_lsn)) if row.aside is not None and row.aside.until_lsn else None,
        "generation": row.generation,
        "envelope": row.envelope,
        "reason": row.reason,
        "fix": row.fix,
        "parked_at": str(Lsn(row.parked_lsn)) if row.parked_lsn else None,
        "since_ms": row.since_ms,
        "recopy": row.recopy,
        "again_at_ms": row.again_ms or None,
        "identity": row.identity,
        "identities_before": dict([*row.identities_asked.values(), *row.identities.values()]),
        "columns": [[c.name, c.type_name, c.key_index] for c in row.columns],
    }
