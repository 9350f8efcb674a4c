"""`tidemill capture`: the tables of captured databases, why one is not captured, and the way out."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import Invalid, Missing
from tidemill.base.frontier import Lsn
from tidemill.cli.context import ConfigOption, JsonOption, Stores, print_json, stores
from tidemill.metastore.catalogue import CaptureTableRow

app = typer.Typer(help="List captured tables; copy one of them again.", no_args_is_help=True)
CaptureOption = Annotated[str, typer.Option("--capture", help="Which capture; needed where several have the table.")]


@app.command("list")
def list_tables(capture: CaptureOption = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the tables: captured, parked, dropped, refused or left out, with the reason and what to do about it."""
    with stores(config) as opened:
        rows = [row for row in opened.portal.call(opened.catalogue.all_tables()) if capture in ("", row.capture)]
    if as_json:
        print_json([_described(row) for row in rows])
        return
    for row in rows:
        state = "copying" if row.state == "captured" and row.snapshot is None else row.state
        at = f"  at {Lsn(row.parked_lsn)}" if row.parked_lsn else ""
        print(f"{row.capture:12} {row.table:32} {state:9}{at}{'  recopy asked' if row.recopy else ''}")
        if row.reason:
            print(f"    {row.reason} {row.fix}".rstrip())


@app.command("recopy")
def recopy(
    table: Annotated[str, typer.Argument(help="schema.table, as `tidemill capture list` names it.")],
    capture: CaptureOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy one table again, beside the stream of the others, into a new generation of its topic.

    Its shards take it over by themselves when its columns are as they were; else they must be dropped first
    (tidemill shard drop), since a shard has the columns it was made with.
    """
    from tidemill.capture.recopy import ask

    with stores(config) as opened:
        row = _find(opened, table, capture)
        if not yes:
            _confirm(row)
        row = opened.portal.call(ask(opened.catalogue, row.capture, row.table))
    if as_json:
        print_json(_described(row))
    else:
        print(f"{row.table} is copied again by capture {row.capture} within seconds. See: tidemill capture list")


def _find(opened: Stores, table: str, capture: str) -> CaptureTableRow:
    from tidemill.capture.naming import split_name, table_name

    name = table_name(*split_name(table))
    rows = [
        row
        for row in opened.portal.call(opened.catalogue.all_tables())
        if row.table in (name, table) and capture in ("", row.capture)
    ]
    if not rows:
        raise Missing(f"no such captured table: table={name}.", fix="See tidemill capture list.")
    if len(rows) > 1:
        captures = ",".join(row.capture for row in rows)
        raise Invalid(f"several captures have this table: table={name} captures={captures}.", fix="Add --capture NAME.")
    return rows[0]


def _confirm(row: CaptureTableRow) -> None:
    rows = row.snapshot.rows if row.snapshot is not None else 0
    question = f"Copy {row.table} again ({rows:,} rows last time)? Its topic {row.topic} is deleted and made anew."
    if not typer.confirm(question):
        raise Invalid("nothing was done.", fix="Answer y, or add --yes.")


def _described(row: CaptureTableRow) -> dict[str, object]:
    return {
        "capture": row.capture,
        "table": row.table,
        "topic": row.topic,
        "state": row.state,
        "copied": row.snapshot is not None,
        "rows_copied": row.snapshot.rows if row.snapshot is not None else None,
        "generation": row.generation,
        "reason": row.reason,
        "fix": row.fix,
        "parked_at": str(Lsn(row.parked_lsn)) if row.parked_lsn else None,
        "since_ms": row.since_ms,
        "recopy": row.recopy,
        "columns": [[c.name, c.type_name, c.key_index] for c in row.columns],
    }
